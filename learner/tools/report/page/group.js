// A group: its prompt, and its completions side by side.

const OF_SOME = ["advantage", "mismatch"]; // not known of every group
const TOKENS = "A click or the arrow keys tell of a token. ";
const UNTRAINED = "By how much learner and sampler differ was not recorded: the group was not trained on (all of it scored alike, or none), or an earlier gleaner made this run.";

function groupView(group, step, pieces, state) {
  const colours = Object.keys(COLOURS).filter((colour) => colour === "text" || (Object.keys(pieces).length
    && (!OF_SOME.includes(colour) || group.completions.some((one) => colour in one))));
  const colour = colours.includes(state.colour) ? state.colour : "text";
  const cards = el("div", {class: "cards"}), how = el("p", {class: "quiet"}, TOKENS + (colours.includes("mismatch") ? "" : UNTRAINED));
  const fill = (colour) => { // not the choice itself, which has the keyboard
    how.hidden = colour === "text";
    cards.replaceChildren(...group.completions.map((one, i) => card(one, i, pieces, colour)));
  };
  const choice = el("select", {id: "colour", onchange: () => { state.colour = choice.value; fill(choice.value); }},
    ...colours.map((name) => el("option", {value: name, selected: name === colour}, COLOURS[name])));
  fill(colour);
  return [
    el("h3", {}, `Step ${step}, problem `, hostile("bdi", group.problem)),
    el("p", {class: "quiet facts"}, el("span", {}, "group " + group.id), el("span", {}, "epoch " + group.epoch),
      group.attempt ? el("span", {}, "attempt " + group.attempt) : null),
    conversation(group.prompt),
    Object.keys(group.columns).length ? el("details", {}, el("summary", {}, "columns of the data"),
      ...Object.entries(group.columns).map(([name, value]) => el("div", {class: "message"}, hostile("span", name, {class: "quiet"}), hostile("pre", asText(value))))) : null,
    el("label", {class: "shown"}, "Show as ", choice),
    how,
    cards,
  ].filter(Boolean);
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function card(one, i, pieces, colour) {
  const parts = one.parts.map(named);
  const failed = !["ok", "none"].includes(one.status);
  return el("section", {class: "card", "aria-label": "Completion " + (i + 1)},
    el("h4", {}, `${i + 1}. `, el("strong", {}, one.reward === null ? "no reward" : "reward " + number(one.reward)),
      "advantage" in one ? el("span", {class: "quiet"}, ` advantage ${number(one.advantage)}`) : null),
    el("p", {class: "facts quiet"}, ...parts),
    failed ? hostile("p", one.error || reason(one), {class: "remark"}) : null,
    colour === "text" ? said(one) : tokenView(one, pieces, colour),
    turns(one),
    one.logged ? el("p", {class: "facts quiet"}, ...one.logged.map(([name, value]) => hostile("span", `${name} ${typeof value === "string" ? value : number(value)}`))) : null,
    el("p", {class: "facts quiet"}, el("span", {}, count(one.length, "token")), el("span", {}, "ended: " + one.end),
      el("span", {}, versions(one)), el("span", {}, "seed " + one.seed), el("span", {}, "worker " + one.worker),
      one.rows > 1 ? el("span", {}, `the last of ${one.rows} rows`) : null,
      ...(one.env || []).map(named)));
}

const named = ([name, value]) => hostile("span", `${name} ${number(value)}`);

// Runs before schema version 3 kept the kind of a failure and which functions gave no number, and not its words.
function reason(one) {
  const kinds = {error: "a reward function raised", timeout: "a reward function took too long",
    nan: "a reward function returned a number that is not finite", environment: "the environment failed"};
  const silent = one.parts.filter(([, value]) => value === null).map(([name]) => name);
  return (kinds[one.status] || one.status) + (silent.length ? `; without a number: ${silent.join(", ")}` : "") + ". The run's log has its words.";
}

function versions(one) {
  const [oldest, newest] = one.versions;
  return oldest === newest ? `policy version ${newest}` : `policy versions ${oldest} to ${newest}`;
}

function said(one) {
  if (one.messages && one.messages.length) return conversation(one.messages);
  return one.text ? hostile("pre", one.text, {tabindex: 0}) : el("p", {class: "quiet"}, "no text");
}

function conversation(messages) {
  if (typeof messages === "string") return hostile("pre", messages);
  return el("div", {class: "conversation"}, ...messages.map((message) => {
    const content = message.content === null || message.content === undefined ? "" : asText(message.content);
    const calls = (message.tool_calls || []).map((call) => hostile("pre", "→ " + (call.function
      ? `${call.function.name}(${asText(call.function.arguments)})` : asText(call)), {class: "call"}));
    return el("div", {class: "message"}, el("span", {class: "quiet"}, String(message.role) + (message.name ? " " + message.name : "")),
      content ? hostile("pre", content) : null, ...calls);
  }));
}

function turns(one) {
  if (!one.turns || !one.turns.length) return null;
  const rewarded = one.turns.some((turn) => turn.reward !== null); // else by its end alone
  const rows = one.turns.map((turn, i) => [i + 1, turn.stop - turn.start, ...(rewarded ? [number(turn.reward)] : []), turn.calls,
    turn.malformed, Math.round(turn.generate_ms), Math.round(turn.env_ms)]);
  return el("details", {}, el("summary", {}, count(rows.length, "turn")),
    table(["turn", "tokens", ...(rewarded ? ["reward"] : []), "calls", "malformed", "generate ms", "environment ms"], rows));
}
