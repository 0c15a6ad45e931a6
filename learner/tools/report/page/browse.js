// The list of groups, its filters, and the group that is open.

const PAGE = 40;
const state = {index: null, pieces: {}, found: [], page: 0, open: null, colour: "text"};

const FILTERS = ["step", "problem", "least", "most", "failed", "order"];

function browse(index, pieces) {
  state.index = index;
  state.pieces = pieces;
  choices([...new Set(index.step)]);
  redrawn(byId("errors"), ...errors(index));
  state.found = matching();
  list();
}

// A choice that may be open is only added to, which is what a run that goes on does.
function choices(steps) {
  const select = byId("step"), shown = [...select.options].slice(1).map((option) => Number(option.value)), chosen = select.value;
  const kept = shown.every((step, i) => step === steps[i]) ? shown.length : 0;
  if (kept < shown.length) select.replaceChildren(select.options[0]);
  select.append(...steps.slice(kept).map((step) => el("option", {value: step, selected: String(step) === chosen}, String(step))));
}

// What failed, in words, of all completions that the page holds.
function errors(index) {
  if (!index.errors.length) return [];
  const failed = index.failed.reduce((a, b) => a + b, 0), all = completions([...index.step.keys()]);
  const rows = index.errors.map(([sentence, many, first, last]) => [sentence, many, first === last ? first : `${first} to ${last}`]);
  return [el("details", {}, el("summary", {}, `${failed} of ${count(all, "completion")} failed`), table(["sentence", "completions", "steps"], rows))];
}

const completions = (places) => places.reduce((sum, i) => sum + state.index.rewards[i].length, 0);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);

function matching() {
  const {index} = state, wanted = Object.fromEntries(FILTERS.map((name) => [name, byId(name).value]));
  const words = wanted.problem.toLowerCase().trim();
  const least = wanted.least === "" ? -Infinity : Number(wanted.least), most = wanted.most === "" ? Infinity : Number(wanted.most);
  const fits = words ? index.problems.map(([id, prompt]) => (id + " " + prompt).toLowerCase().includes(words)) : null;
  const found = [];
  for (let i = 0; i < index.step.length; i++) {
    if (wanted.step !== "" && index.step[i] !== Number(wanted.step)) continue;
    if (fits && !fits[index.problem[i]]) continue;
    if (byId("failed").checked && !index.failed[i]) continue;
    const bounded = wanted.least !== "" || wanted.most !== "";
    if (bounded && !index.rewards[i].some((reward) => reward !== null && reward >= least && reward <= most)) continue;
    found.push(i);
  }
  const known = (i) => index.rewards[i].filter((reward) => reward !== null);
  const keys = {low: (i) => mean(known(i)), high: (i) => -mean(known(i)), spread: (i) => Math.min(...known(i)) - Math.max(...known(i))};
  if (!(wanted.order in keys)) return found;
  const keyed = found.map((i) => [keys[wanted.order](i), i]).map(([key, i]) => [Number.isNaN(key) ? Infinity : key, i]);
  return keyed.sort((a, b) => (a[0] === b[0] ? a[1] - b[1] : a[0] < b[0] ? -1 : 1)).map(([, i]) => i);
}

function search() {
  state.found = matching();
  state.page = 0;
  list();
}

function list() {
  const {index, found} = state, pages = Math.ceil(found.length / PAGE), page = Math.max(0, Math.min(state.page, pages - 1));
  const shown = found.slice(page * PAGE, (page + 1) * PAGE);
  byId("count").textContent = index.step.length
    ? `${found.length} of ${count(index.step.length, "group")}, ${completions(found)} of ${count(completions([...index.step.keys()]), "completion")}`
    : "No completions yet.";
  byId("completions").classList.toggle("none", !index.step.length);
  redrawn(byId("list"), ...shown.map(item));
  const turn = (by, label) => el("button", {type: "button", disabled: page + by < 0 || page + by >= pages,
    onclick: () => { state.page = page + by; list(); byId("list").querySelector("button")?.focus(); }}, label);
  byId("pages").replaceChildren(...(pages > 1 ? [turn(-1, "← before"), ` ${page + 1} of ${pages} `, turn(1, "after →")] : []));
}

function item(i) {
  const {index} = state, known = index.rewards[i].filter((reward) => reward !== null);
  const [id, prompt] = index.problems[index.problem[i]];
  const range = known.length ? `${number(mean(known))} (${number(Math.min(...known))} to ${number(Math.max(...known))})` : "no reward";
  return el("li", {}, el("button", {type: "button", "data-group": i, "aria-current": state.open === i ? "true" : null, onclick: () => show(i)},
    el("span", {class: "line"}, el("b", {}, "step " + index.step[i]), el("span", {}, range), bars(known)),
    hostile("span", prompt || id, {class: "prompt"}),
    index.failed[i] ? el("span", {class: "failure"}, `${index.failed[i]} failed`) : null));
}

// The rewards of a group, smallest first, between the least and the greatest of the run.
function bars(rewards) {
  const [low, high] = limits(), svg = el("svg:svg", {class: "spark", viewBox: "0 0 64 16", "aria-hidden": "true"});
  const wide = 64 / Math.max(rewards.length, 8);
  [...rewards].sort((a, b) => a - b).forEach((reward, i) => {
    const tall = 1 + 15 * (high > low ? (reward - low) / (high - low) : 1);
    svg.append(el("svg:rect", {x: i * wide, y: 16 - tall, width: wide * 0.8, height: tall}));
  });
  return svg;
}

function limits() {
  const {index} = state;
  if (!index.limits) {
    let low = Infinity, high = -Infinity;
    for (const group of index.rewards) for (const reward of group) if (reward !== null) { low = Math.min(low, reward); high = Math.max(high, reward); }
    index.limits = [low, high];
  }
  return index.limits;
}

async function show(i) {
  state.open = i;
  for (const button of byId("list").querySelectorAll("button"))
    if (Number(button.dataset.group) === i) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
  try {
    const groups = await stepGroups(state.index.step[i]);
    if (state.open !== i) return;
    byId("group").replaceChildren(beside(), ...groupView(groups[state.index.place[i]], state.index.step[i], state.pieces, state));
    byId("group").focus({preventScroll: true});
    toTop(byId("group"));
  } catch (error) { trouble(error); }
}

// To the groups before and after the open one, where there are no keys.
function beside() {
  const at = state.found.indexOf(state.open);
  const turn = (by, label) => el("button", {type: "button", disabled: !(at + by in state.found), onclick: () => move(by)}, label);
  return el("p", {class: "turn"}, turn(-1, "← previous group"), turn(1, "next group →"));
}

// The list stands beside the group where there is room, so that mostly nothing need move.
function toTop(element) {
  const {top} = element.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) element.scrollIntoView({block: "start"});
}

function move(by) {
  const at = state.found.indexOf(state.open);
  const next = state.found[Math.max(0, Math.min(at + by, state.found.length - 1))];
  if (next === undefined) return;
  state.page = Math.floor(state.found.indexOf(next) / PAGE);
  list();
  show(next);
}

function keys(event) {
  const typing = event.target.closest?.("input, select, textarea") && event.key !== "Escape";
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const buttons = [...byId("list").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
  if (event.key === "/") { event.preventDefault(); byId("problem").focus(); }
  else if (event.key === "n" || event.key === "p") move(event.key === "n" ? 1 : -1);
  else if (event.key === "Escape") (buttons.find((one) => one.getAttribute("aria-current")) || buttons[0])?.focus();
  else if (at >= 0 && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    event.preventDefault();
    buttons[Math.max(0, Math.min(at + (event.key === "ArrowDown" ? 1 : -1), buttons.length - 1))].focus();
  }
}
