// Blocks of data: base64 of gzip of JSON, in the page, or at its server's while a run trains.

const LIVE = !byId("block-head");
const GONE = "gleaner report --live does not answer any more; start it again and open the address that it prints. What is shown stays.";

async function packedBlock(name) {
  if (LIVE) {
    const answer = await fetch(name).catch(() => { throw new Error(GONE); });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text.trim());
    return text;
  }
  if (!byId("block-" + name) && document.readyState === "loading")
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, {once: true}));
  const element = byId("block-" + name);
  if (!element) throw new Error("The page holds no " + name + ".");
  return element.textContent;
}

async function unpacked(text) {
  const binary = atob(text);
  const compressed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) compressed[i] = binary.charCodeAt(i);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const block = async (name) => unpacked(await packedBlock(name));

// The last few steps that were opened stay unpacked.
const opened = new Map();
const KEPT = 4;

async function stepGroups(step) {
  if (!opened.has(step)) opened.set(step, block("step-" + step));
  const found = opened.get(step);
  opened.delete(step);
  opened.set(step, found);
  while (opened.size > KEPT) opened.delete(opened.keys().next().value);
  return found;
}

function trouble(error) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = error.message;
}
