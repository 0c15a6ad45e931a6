// Where the time went: a bar for each start of a run, all on one scale.

// The parts of the start are shades of one colour.
const PHASES = {preflight: "colour6 fainter", Ray: "colour6 faint", processes: "colour6", evaluation: "colour2", checkpoints: "colour4",
  training: "colour1", generation: "colour0", "weight sync": "colour3", other: "colour7", end: "colour5"};

const whole = (start) => Object.values(start.phases).reduce((sum, seconds) => sum + seconds, 0);

function starts(runs) {
  const most = Math.max(...runs.flatMap((run) => run.starts.map(whole)));
  return runs.filter((run) => run.starts.length).map((run) => {
    const names = [...new Set(run.starts.flatMap((start) => Object.keys(start.phases)))];
    const spent = (start, name) => start.phases[name] ?? 0;
    const all = run.starts.reduce((sum, start) => sum + whole(start), 0);
    const legend = names.map((name) => {
      const seconds = run.starts.reduce((sum, start) => sum + spent(start, name), 0);
      return el("li", {}, el("i", {class: `square ${PHASES[name] ?? ""}`}), name + " ", el("b", {}, duration(seconds)),
        el("span", {class: "quiet"}, ` ${Math.round((100 * seconds) / (all || 1))} %`));
    });
    const rows = run.starts.map((start) => [start.steps, duration(whole(start)), ...names.map((name) => duration(spent(start, name)))]);
    return el("div", {class: "role"}, runs.length > 1 ? el("h3", {}, run.name) : null,
      ...run.starts.map((start) => el("div", {class: "start"}, el("span", {}, start.steps), stacked(start, most), el("b", {}, duration(whole(start))))),
      el("ul", {class: "legend"}, ...legend),
      rows.length > 1 ? el("details", {}, el("summary", {}, "each start"), table(["", "whole", ...names], rows)) : null);
  });
}

// most: seconds of the whole width.
function stacked(start, most) {
  const svg = el("svg:svg", {viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img",
    "aria-label": Object.entries(start.phases).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ")});
  let at = 0;
  for (const [name, seconds] of Object.entries(start.phases)) {
    const wide = (1000 * seconds) / (most || 1);
    svg.append(el("svg:rect", {class: PHASES[name] ?? "colour7", x: at.toFixed(2), y: 0, width: wide.toFixed(2), height: 10},
      el("svg:title", {}, `${name} ${duration(seconds)}`)));
    at += wide;
  }
  return svg;
}
