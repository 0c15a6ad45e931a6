// A completion as its tokens, coloured by what is known of each.

const COLOURS = {
  text: "plain text",
  logprob: "logprob: the stronger, the less likely when it was sampled",
  advantage: "advantage: blue above its group, orange below",
  mismatch: "learner minus sampler: blue above, orange below, 1e-7 to 1 nat",
  version: "policy version: the stronger, the newer",
};

function tokenView(completion, pieces, colour) {
  const box = el("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys read them"});
  const said = el("p", {class: "quiet said", role: "status"});
  const observed = new Set((completion.observed || []).flatMap(([a, b]) => Array.from({length: b - a}, (_, i) => a + i)));
  const texts = textsOf(completion.ids, pieces);
  const spans = texts.map((text, i) => {
    const shade = observed.has(i) ? "observed" : shadeOf(completion, i, colour);
    return written(el("span", {class: text ? shade : `${shade ?? ""} part`}), text);
  });
  box.append(...spans);
  box.dir = "auto"; // last, as in text.js
  let place = -1;
  const tell = (at) => {
    spans[place]?.classList.remove("chosen");
    place = Math.max(0, Math.min(at, spans.length - 1));
    spans[place].classList.add("chosen");
    said.textContent = sentence(completion, place, texts[place], observed.has(place));
  };
  box.addEventListener("click", (event) => {
    const at = spans.findIndex((span) => span.contains(event.target));
    if (at >= 0) tell(at);
  });
  box.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: spans.length - 1};
    if (event.key in moves && spans.length) { event.preventDefault(); event.stopPropagation(); tell(moves[event.key]); }
  });
  return el("div", {}, box, said);
}

// Of each token. A character that several of them make, whose pieces are bytes, stands at the last one; "" before it.
function textsOf(ids, pieces) {
  const decoder = new TextDecoder("utf-8", {ignoreBOM: true}), bytes = (id) => Array.isArray(pieces[id]);
  return ids.map((id, i) => (bytes(id) ? decoder.decode(new Uint8Array(pieces[id]), {stream: bytes(ids[i + 1])}) : pieces[id] ?? `<${id}>`));
}

function shadeOf(completion, i, colour) {
  const level = (share) => Math.max(0, Math.min(5, Math.ceil(share * 5 - 0.2)));
  if (colour === "logprob") {
    const logprob = completion.logprobs[i];
    return logprob === null ? null : "unlikely" + level(-logprob / 400);
  }
  if (colour === "advantage") {
    const advantage = completion.advantage ?? 0;
    return (advantage < 0 ? "below" : "above") + level(Math.abs(advantage) / 2);
  }
  if (colour === "mismatch") {
    const mismatch = completion.mismatch ? completion.mismatch[i] : null;
    if (!mismatch) return null;
    return (mismatch < 0 ? "below" : "above") + level((Math.log10(Math.abs(mismatch)) + 7) / 7);
  }
  const [oldest, newest] = completion.versions;
  const version = completion.token_versions ? completion.token_versions[i] : newest;
  return "newer" + (newest === oldest ? 1 : 1 + level((0.8 * (version - oldest)) / (newest - oldest)));
}

function sentence(completion, i, text, observed) {
  const name = `Token ${i + 1} of ${completion.ids.length}, id ${completion.ids[i]}, ${text ? JSON.stringify(text) : "part of the next character"}: `;
  if (observed) return name + "observed, not sampled.";
  const logprob = completion.logprobs[i];
  const version = completion.token_versions ? completion.token_versions[i] : completion.versions[1];
  const chance = logprob === null ? "logprob not finite" : `logprob ${(logprob / 100).toFixed(2)}, probability ${number(Math.exp(logprob / 100))}`;
  const mismatch = completion.mismatch ? completion.mismatch[i] : null;
  const differs = mismatch === null ? "" : `, learner minus sampler ${mismatch === 0 ? "0" : mismatch.toExponential(1)} nats`;
  return name + `${chance}, policy version ${version}${differs}.`;
}
