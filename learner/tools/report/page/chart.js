// Line charts. Pointer or arrow keys choose a step, whose values stand in the legend.

const WIDTH = 420, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;
const MOST = 800; // points of a line; of more, the least and greatest of each stretch are drawn
const NOISY = 30; // points from which on a line's mean over a stretch is drawn, and the points themselves faintly
const SHARE = 0.04; // of a line's points that such a mean is of, to either side

function ticks(low, high, many) {
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9 && found.length <= 2 * many; i++) found.push(Number((i * size).toPrecision(12)));
  return found;
}

function thinned(points) {
  if (points.length <= MOST) return points;
  const kept = [], stretch = Math.ceil(points.length / (MOST / 2));
  for (let i = 0; i < points.length; i += stretch) {
    const some = points.slice(i, i + stretch);
    const low = some.reduce((a, b) => (b[1] < a[1] ? b : a)), high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] < high[0] ? [low, high] : low === high ? [low] : [high, low]));
  }
  return kept;
}

// The mean of each point and those beside it, as many to either side; fewer at both ends.
function smoothed(points) {
  const most = Math.max(2, Math.round(points.length * SHARE)), sums = [0];
  for (const [, y] of points) sums.push(sums.at(-1) + y);
  return points.map(([x], i) => {
    const side = Math.min(most, i, points.length - 1 - i);
    return [x, (sums[i + side + 1] - sums[i - side]) / (2 * side + 1)];
  });
}

// lines: [{label, points: [[step, value]], dashed, colour}]; x and y map values to places in the picture.
function scales(lines, log) {
  const xs = lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]);
  let ys = lines.flatMap((line) => line.points.map((point) => point[1]));
  if (log) ys = ys.map(Math.log10);
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  for (const y of ys) { low = Math.min(low, y); high = Math.max(high, y); }
  for (const x of xs) { first = Math.min(first, x); last = Math.max(last, x); }
  if (!log && low > 0 && low < 0.6 * high) low = 0; // near enough to be worth seeing
  if (log) { low = Math.floor(low); high = Math.max(Math.ceil(high), low + 1); } // whole powers of ten
  if (low === 0 && high === 0) high = 1; // a share
  if (low === high) { const room = Math.abs(low) * 0.1 || 0.5; low -= room; high += room; }
  if (first === last) { first -= 0.5; last += 0.5; }
  return {
    first, last, low, high,
    x: (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - RIGHT),
    y: (value) => TOP + ((high - (log ? Math.log10(value) : value)) / (high - low)) * (HEIGHT - TOP - BOTTOM),
  };
}

function axes(svg, scale, log) {
  const rows = ticks(scale.low, scale.high, 4).filter((tick) => !log || Number.isInteger(tick));
  for (const tick of rows) {
    const value = log ? 10 ** tick : tick, y = scale.y(value);
    svg.append(el("svg:line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y}));
    svg.append(el("svg:text", {class: "tick", x: LEFT - 5, y: y + 4, "text-anchor": "end"}, log ? "1e" + tick : number(tick)));
  }
  for (const tick of ticks(scale.first, scale.last, 5).filter(Number.isInteger)) {
    const x = scale.x(tick), room = 3.5 * String(tick).length; // half of the label's width
    svg.append(el("svg:text", {class: "tick", x: Math.min(x, WIDTH - room), y: HEIGHT - 6, "text-anchor": "middle"}, String(tick)));
  }
}

function chart(title, hint, lines, log) {
  lines = lines.map((line) => ({...line, points: line.points.filter((point) => point[1] !== null && (!log || point[1] > 0))}));
  lines = lines.filter((line) => line.points.length);
  if (!lines.length) return null;
  const scale = scales(lines, log);
  const svg = el("svg:svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
    "aria-label": title + ". " + lines.map((line) => `${line.label}: ${number(line.points[0][1])} at step ${line.points[0][0]}, ${number(line.points.at(-1)[1])} at step ${line.points.at(-1)[0]}`).join("; ")});
  axes(svg, scale, log);
  const values = lines.map(() => el("b"));
  for (const line of [...lines].reverse()) { // the first one lies on top
    const drawn = (some) => thinned(some).map(([x, y]) => scale.x(x).toFixed(1) + "," + scale.y(y).toFixed(1)).join(" ");
    const look = `colour${line.colour}` + (line.dashed ? " dashed" : "");
    if (line.points.length === 1) {
      const [x, y] = line.points[0];
      svg.append(el("svg:circle", {class: look, cx: scale.x(x), cy: scale.y(y), r: 3}));
    } else if (line.points.length < NOISY) svg.append(el("svg:polyline", {class: look, points: drawn(line.points)}));
    else svg.append(el("svg:polyline", {class: look + " faint", points: drawn(line.points)}), el("svg:polyline", {class: look, points: drawn(smoothed(line.points))}));
  }
  const cursor = el("svg:line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  svg.append(cursor);
  const where = el("span", {class: "quiet"});
  reading(svg, cursor, where, values, lines, scale);
  const legend = el("ul", {class: "legend"}, ...[...new Set(lines.map((line) => line.label))].map((label) =>
    el("li", {}, label, ...lines.flatMap((line, i) => (line.label === label
      ? [" ", el("i", {class: `colour${line.colour}` + (line.dashed ? " dashed" : "")}), values[i]] : [])))));
  return el("figure", {}, el("figcaption", {}, el("h3", {}, title), el("span", {class: "quiet"}, hint)), svg, legend, where);
}

function reading(svg, cursor, where, values, lines, scale) {
  const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const known = lines.map((line) => new Map(line.points));
  let place = steps.length;
  const show = (at) => {
    place = Math.max(0, Math.min(at, steps.length));
    const step = steps[place];
    const x = step === undefined ? 0 : scale.x(step);
    cursor.setAttribute("visibility", step === undefined ? "hidden" : "visible");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    where.textContent = step === undefined ? "last values" : "step " + step;
    lines.forEach((line, i) => {
      const value = step === undefined ? line.points.at(-1)[1] : known[i].get(step);
      values[i].textContent = value === undefined ? "–" : number(value);
    });
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const wanted = scale.first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (scale.last - scale.first);
    let low = 0, high = steps.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < wanted) low = middle + 1; else high = middle; }
    show(low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low);
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", () => show(steps.length));
  svg.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1, Escape: steps.length};
    if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
  });
  show(steps.length);
}
