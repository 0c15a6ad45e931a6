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

// As replaceChildren; what has the keyboard and which details are open stays so, by their places.
function redrawn(box, ...children) {
  const reached = () => [...box.querySelectorAll("button, select, summary, [tabindex]")], at = reached().indexOf(document.activeElement);
  const open = [...box.querySelectorAll("details")].map((one) => one.open);
  box.replaceChildren(...children);
  box.querySelectorAll("details").forEach((one, i) => { one.open = open[i] ?? false; });
  if (at >= 0) reached()[at]?.focus({preventScroll: true});
}

// Shown by their numbers: control characters, those that turn the direction of what follows, and others that one would
// not see (the categories of learner/tools/rollouts.py). Many of one kind in a row are shown once.
const HIDDEN = /((?![\t\n])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}])\1*/gu;

function written(parent, text) {
  let at = 0;
  for (const {0: found, 1: one, index} of text.matchAll(HIDDEN)) {
    const code = "U+" + one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"), many = found.length / one.length;
    parent.append(text.slice(at, index), el("span", {class: "hidden-character", title: "a character that is not visible"}, many > 1 ? `${code}, ${many} times` : code));
    at = index + found.length;
  }
  parent.append(text.slice(at));
  return parent;
}

// Text in a box of its own, whose direction is that of its first letter and leaks nowhere.
function hostile(tag, text, attributes = {}) {
  const box = written(el(tag, attributes), text);
  box.dir = "auto"; // last: a browser works it out anew at each piece that is added
  return box;
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
