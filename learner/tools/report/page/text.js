// Elements, and text that nobody should trust: all of it goes through textContent.

const SVG = "http://www.w3.org/2000/svg";

// el("p", {class: "x", onclick: f}, "text", child)
function el(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);

// Control characters, and those that turn the direction of what follows, are shown by their numbers.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;

function written(parent, text) {
  let plain = "";
  for (const one of text) {
    if (!HIDDEN.test(one)) { plain += one; continue; }
    if (plain) parent.append(plain);
    plain = "";
    const code = "U+" + one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parent.append(el("span", {class: "hidden-character", title: "a character that is not visible"}, code));
  }
  if (plain) parent.append(plain);
  return parent;
}

const hasHidden = (text) => HIDDEN.test(text);

// Text in a box of its own, whose direction is that of its first letter and leaks nowhere.
function hostile(tag, text, attributes = {}) {
  const box = el(tag, {dir: "auto", ...attributes});
  if (!hasHidden(text)) { box.textContent = text; return box; }
  return written(box, text);
}

function number(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 3)));
}

function bytes(value) {
  if (!value) return "unknown";
  return value >= 2 ** 30 ? (value / 2 ** 30).toFixed(1) + " GiB" : Math.round(value / 2 ** 20) + " MiB";
}

// `40.0 s`, `12 min`, `3 h 05 min`
function duration(seconds) {
  if (seconds < 90) return seconds.toFixed(1) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? minutes + " min" : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function count(many, what) { return many + " " + what + (many === 1 ? "" : "s"); }
