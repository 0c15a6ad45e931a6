// Draws the page once; while a run trains, again whenever its server has something new.

const EVERY_MS = 3000;
let drawnHead = "";

async function draw() {
  const packed = await packedBlock("head");
  if (packed === drawnHead) return;
  const head = await unpacked(packed);
  overview(head);
  if (head.colours) byId("overview").append(el("p", {class: "remark"}, head.colours));
  const [index, pieces] = await Promise.all([block("index"), block("pieces")]);
  if (LIVE) opened.clear();
  const open = state.open === null ? null : [state.index.step[state.open], state.index.place[state.open]];
  browse({step: [], place: [], problem: [], rewards: [], failed: [], problems: [], errors: [], ...index}, pieces);
  state.open = open && index.step ? index.step.findIndex((step, i) => step === open[0] && index.place[i] === open[1]) : null;
  if (drawnHead === "") document.body.dataset.drawn = performance.now().toFixed(0);
  drawnHead = packed;
}

async function again() {
  try {
    await draw();
    byId("trouble").hidden = true;
  } catch (error) { trouble(error); }
  if (LIVE) setTimeout(again, EVERY_MS);
}

byId("metric").addEventListener("change", other);
for (const name of FILTERS) byId(name).addEventListener("input", search);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", keys);
again();
