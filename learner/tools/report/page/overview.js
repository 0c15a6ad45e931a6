// Headline, curves, memory and settings of one run or two.

function overview(head) {
  document.title = head.title;
  byId("title").textContent = head.title;
  byId("overview").replaceChildren(...head.runs.map(headline));
  byId("lines").textContent = head.runs.length > 1 ? `Solid: ${head.runs[0].name}. Dashed: ${head.runs[1].name}.${unlike(head)}` : "";
  const [dull, telling] = [true, false].map((still) => head.figures.filter((figure) => unmoved(head, figure) === still));
  redrawn(byId("figures"), ...telling.map((figure) => drawn(head, figure)).filter(Boolean));
  const folded = dull.map((figure) => [figure.title, drawn(head, figure)]).filter(([, one]) => one);
  redrawn(byId("still"), ...folded.map(([, one]) => one));
  byId("unchanged").hidden = !folded.length;
  byId("unchanged-names").textContent = `${folded.length} that do not change: ` + folded.map(([title]) => title).join(", ");
  byId("curves").hidden = !head.figures.length;
  chooser(head);
  redrawn(byId("bars"), ...head.runs.flatMap((run) => memory(run, head.runs.length > 1)));
  byId("memory").hidden = head.runs.every((run) => !run.memory.length);
  redrawn(byId("starts"), ...starts(head.runs));
  byId("time").hidden = head.runs.every((run) => !run.starts.length);
  for (const link of document.querySelectorAll("nav a")) link.hidden = byId(link.hash.slice(1)).hidden;
  if (head.runs.length > 1) {
    byId("completions-title").textContent = "Completions of " + head.runs[0].name;
    byId("whose").textContent = "The configuration of " + head.runs[0].name;
  }
  byId("differences").replaceChildren(...differences(head));
  byId("config").replaceChildren(table(["key", "value"], Object.entries(head.runs[0].config)));
}

function difference({before, after}) {
  return after === before ? "unchanged" : (after > before ? "+" : "−") + number(Math.abs(after - before));
}

function headline(run) {
  const tiles = run.changes.map((change) => el("div", {class: "tile"},
    el("span", {class: "quiet"}, change.label),
    el("strong", {}, number(change.after)),
    el("span", {class: "quiet"}, change.first === change.last ? `at step ${change.last}`
      : difference(change) + ` since step ${change.first} (${number(change.before)})`)));
  const steps = el("div", {class: "tile"}, el("span", {class: "quiet"}, "steps"), el("strong", {}, String(run.done)),
    el("span", {class: "quiet"}, run.of ? "of " + run.of : ""));
  const facts = run.facts.map(([name, value]) => hostile("span", name + " " + value));
  return el("div", {class: "headline"}, el("h2", {}, run.name), el("p", {class: "facts quiet"}, ...facts),
    el("div", {class: "tiles"}, steps, ...tiles),
    ...run.remarks.map((remark) => hostile("p", remark, {class: "remark"})));
}

// Settings of data and env that leave the held-out problems as they are.
const SAME_PROBLEMS = ["data.eval.every", "env.concurrency", "env.step_timeout_s", "env.variables"];

// Of two runs, what their curves are not to be compared by.
function unlike({differences, runs}) {
  const keys = differences.map(([key]) => key).filter((key) => !SAME_PROBLEMS.includes(key));
  const others = ["data", "env"].filter((part) => keys.some((key) => key.startsWith(part + "."))).map((part) => "settings of " + part);
  if (keys.includes("seed") && runs.every(seeded)) others.push("seeds");
  return (keys.some((key) => key.startsWith("rewards."))
    ? " The reward is not on one scale, since rewards differ; nor is held-out accuracy, if another function decides it." : "")
    + (others.length ? ` Held-out accuracy is not of the same problems, since ${others.join(" and ")} differ.` : "");
}

// Whether the seed makes a run's held-out problems, or chooses them among those of training (rollout/data/problems.py).
function seeded({config}) {
  const [every, own, split, path] = ["eval.every", "eval.path", "eval.split", "path"].map((key) => config["data." + key] || "null");
  return every !== "0" && ((own === "null" ? path : own).startsWith("rg:") || (own === "null" && split === "null"));
}

function line(run, metric, colour, dashed, label) {
  return {label, colour, dashed, points: run.steps.map((step, i) => [step, run.metrics[metric][i]])};
}

function linesOf(head, {metrics}) {
  return head.runs.flatMap((run, which) => metrics.filter((metric) => metric in run.metrics).map((metric) => {
    const own = metrics.length === 1 ? metric : metric.slice(metric.indexOf("/") + 1);
    return line(run, metric, metrics.indexOf(metric) % 8, which === 1, own);
  }));
}

// Whether each metric of a figure of at least three steps has one value throughout, the same in both runs. Of rewards and
// accuracy that is worth seeing.
function unmoved(head, figure) {
  const valuesOf = (metric) => head.runs.flatMap((run) => run.metrics[metric] || []).filter((value) => value !== null);
  const values = figure.metrics.map(valuesOf);
  return !figure.metrics.some((metric) => /^(reward\/mean$|eval\/)/.test(metric)) && values.some((some) => some.length > 2)
    && values.every((some) => some.every((value) => value === some[0]));
}

function drawn(head, figure) {
  return chart(figure.title, figure.hint, linesOf(head, figure), figure.log);
}

// Any other metric, by name.
let metricsOf = null;

function chooser(head) {
  metricsOf = head;
  const names = [...new Set(head.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "at").sort();
  const select = byId("metric"), chosen = select.value;
  if (select.options.length !== names.length + 1) // else it may be open
    select.replaceChildren(select.options[0], ...names.map((name) => el("option", {selected: name === chosen}, name)));
  other();
}

function other() {
  const metric = byId("metric").value, figure = metric && drawn(metricsOf, {title: metric, hint: "", metrics: [metric], log: false});
  redrawn(byId("other"), ...(figure ? [figure] : []));
}

function memory(run, named) {
  const most = Math.max(...run.memory.flatMap((role) => [role.planned || 0, role.measured || 0]));
  return run.memory.map((role) => {
    const bar = (what, value) => el("tr", {}, el("th", {scope: "row"}, what), el("td", {}, bytes(value)),
      el("td", {class: "bar"}, el("meter", {min: 0, max: most, value: value || 0, "aria-label": `${role.role} ${what}`})));
    const parts = Object.entries(role.parts || {}).sort((a, b) => b[1] - a[1]).map(([name, value]) => [name, bytes(value)]);
    return el("div", {class: "role"}, el("h3", {}, role.role + (named ? ` (${run.name})` : "")),
      el("table", {}, bar("planned", role.planned), bar("measured peak", role.measured)),
      role.planned && role.measured > role.planned ? el("p", {class: "remark"}, `${number((100 * role.measured) / role.planned - 100)} % above the plan`) : null,
      parts.length ? el("details", {}, el("summary", {}, "parts of the plan"), table(["part", "planned"], parts)) : null);
  });
}

function table(heads, rows) {
  return el("div", {class: "scroll"}, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {scope: "col"}, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => hostile("td", String(cell))))))));
}

function differences(head) {
  if (head.runs.length < 2) return [];
  if (!head.differences.length) return [el("p", {}, "Both runs have the same settings.")];
  return [el("h3", {}, "Settings that differ"), table(["key", ...head.runs.map((run) => run.name)], head.differences)];
}
