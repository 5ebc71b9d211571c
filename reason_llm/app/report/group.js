// One group opened: its prompt, and its completions side by side, in one of three modes.

const MODES = [["plain", "Text"], ["logprob", "Log-prob"], ["difference", "Difference"]];
let reference = 0;

async function openGroup(run, index, detail, place) {
  const groups = run.rollouts.groups, step = groups.step[index];
  detail.replaceChildren(make("p", { class: "muted" }, "Opening …"));
  let opened;
  try {
    opened = (await openStep(filters.run, step))[placeInStep(run, index)];
  } catch (error) {
    detail.replaceChildren(make("p", { class: "notice" }, "These rollouts cannot be opened: " + error.message));
    return;
  }
  if (detail.dataset.wanted && detail.dataset.wanted !== String(index)) return;
  const rewards = groups.rewards[index];
  reference = run.rollouts.labels ? 0 : rewards.indexOf(Math.max(...rewards));
  const state = { run, index, opened, detail, place, mode: place.get("mode") || "plain", cards: FIRST_CARDS };
  drawGroup(state);
}

function drawGroup(state) {
  const { run, index, opened, detail, place } = state, { groups, labels } = run.rollouts;
  const back = new URLSearchParams(place);
  back.delete("group");
  const prompt = make("div", { class: "text-block prompt", dir: "auto", tabindex: "0" }, ...limited(opened.prompt, FIRST_CHARS));
  const images = opened.attachments.length ? make("div", { class: "images" }, ...opened.attachments.map(([name, url]) => (url ? make("img", { src: url, alt: name, title: name }) : make("span", { class: "tag" }, ...visible(name))))) : "";
  const cards = make("div", { class: "cards" });
  detail.replaceChildren(
    make("a", { class: "button back", href: "#" + back }, "‹ Back to the list"),
    make("p", { class: "where" }, labels ? "" : `step ${groups.step[index] + 1} · `, ...visible(groups.prompt[index]), opened.answer ? " · gold answer " : "", opened.answer ? make("span", { class: "tag" }, ...visible(opened.answer.slice(0, 200))) : "", labels ? "" : ` · similarity ${shown(groups.similarity[index], 2)}`),
    images, prompt, labels && labels.length < 2 ? "" : modeBar(state), cards);
  const size = opened.completions.length;
  for (let i = 0; i < Math.min(size, state.cards); i++) cards.append(card(state, i));
  if (size > state.cards) cards.append(make("button", { class: "button", type: "button", onclick: () => { state.cards = size; drawGroup(state); } }, `Show all ${size} completions`));
}

function modeBar(state) {
  const bar = make("div", { class: "modes", role: "group", "aria-label": "Show completions as" });
  const any = (name) => state.opened.completions.some((completion) => completion[name] && completion.lengths);
  const why = { logprob: any("logprobs") ? "" : "The tokens of these texts cannot be told apart" };
  if (why[state.mode]) state.mode = "plain";
  for (const [mode, label] of state.run.rollouts.labels ? [MODES[0], MODES[2]] : MODES) {
    bar.append(make("button", { class: "button", type: "button", "aria-pressed": String(state.mode === mode), disabled: Boolean(why[mode]), title: why[mode] || null, onclick: () => {
      state.mode = mode;
      state.place.set("mode", mode);
      history.replaceState(null, "", "#" + state.place);
      drawGroup(state);
    } }, label));
  }
  const legend = (...steps) => bar.append(make("span", { class: "scale" }, ...steps.map(([style, text]) => (style ? make("i", { class: style }, text) : text))));
  if (state.mode === "plain" && any("played")) legend(["reply", "not the model's: it reads it, and learns nothing from it"]);
  if (state.mode === "logprob") legend(["", "probability "], ["p1", "< 0.9"], ["p2", "< 0.6"], ["p3", "< 0.37"], ["p4", "< 0.14"], ["p5", "< 0.02"]);
  if (state.mode === "difference") legend(["", "beside the reference: "]), bar.lastChild.append(make("del", {}, "only there"), " ", make("ins", {}, "only here"));
  return bar;
}

function card(state, i) {
  const { run, index, opened, mode } = state, { groups, labels } = run.rollouts, completion = opened.completions[i];
  const advantage = groups.advantages[index][i], isReference = mode === "difference" && i === reference;
  const reward = groups.rewards[index][i], cut = groups.truncated[index][i] ? "cut off" : "";
  const head = labels ? make("header", {},
    make("b", {}, labels[i]), make("span", {}, filters.view === "held_out" || reward ? `score ${shown(reward)}` : "", cut && `, ${cut}`)) : make("header", {},
    make("b", {}, `${shown(groups.rewards[index][i])}`), make("span", {}, `#${i + 1}`),
    make("span", {}, "advantage ", make("span", { class: advantage > 0 ? "pos" : advantage < 0 ? "neg" : "" }, signed(advantage))),
    make("span", {}, `${groups.lengths[index][i].toLocaleString("en")} tokens${groups.truncated[index][i] ? ", cut off" : ""}`));
  if (completion.played) head.append(make("span", {}, ...visible(outcome(completion.played))));
  const names = Object.keys(groups.parts);
  if (!labels && names.length > 1) for (const name of names) head.append(make("span", {}, ...visible(name), " " + shown(groups.parts[name][index][i])));
  if (mode === "difference") {
    if (isReference) head.append(make("span", {}, "the reference"));
    else head.append(make("button", { type: "button", onclick: () => { reference = i; drawGroup(state); } }, "Compare with this"));
  }
  const body = make("div", { class: "text-block", dir: "auto", tabindex: "0" });
  if (mode === "difference" && !isReference) body.append(...difference(opened.completions[reference].text, completion.text));
  else if (mode === "logprob" && completion.lengths) body.append(...tokens(completion, FIRST_TOKENS, body));
  else if (completion.played && completion.lengths && mode === "plain") body.append(...conversation(completion));
  else body.append(...limited(completion.text, FIRST_CHARS));
  return make("article", { class: "card" + (isReference ? " reference" : "") }, head, body);
}

// The text, cut where it is too long to be read, with a button for the rest.
function limited(text, most) {
  if (text.length <= most) return visible(text, filters.needle);
  const more = make("button", { class: "button", type: "button", onclick: () => more.replaceWith(...visible(text.slice(most), filters.needle)) }, `Show the other ${(text.length - most).toLocaleString("en")} characters`);
  return [...visible(text.slice(0, most), filters.needle), " … ", more];
}

const FOLD_CHARS = 300, CALL = /(<tool_call>[^]*?(?:<\/tool_call>|$))/;
const ENDS = { environment: "over", stop: "no more calls", turns: "out of turns", length: "out of tokens", error: "failed" };

function outcome({ turns, calls, failed_calls, end, problem }) {
  const failed = failed_calls ? `, ${failed_calls} failed` : "";
  return `${turns} turn${turns === 1 ? "" : "s"}, ${calls ? `${calls} call${calls === 1 ? "" : "s"}${failed}, ` : ""}${ENDS[end]}${problem ? `: ${problem}` : ""}`;
}

// A rollout of several turns: what the model wrote, its calls folded, and what it read, long ones
// folded.
function conversation({ text, lengths, played }) {
  const nodes = [];
  let token = 0, at = 0;
  const upTo = (end) => {
    const begin = at;
    while (token < end) at += lengths[token++];
    return text.slice(begin, at);
  };
  for (const [turn, [start, end]] of [...played.spans, [lengths.length, lengths.length]].entries()) {
    for (const part of upTo(start).split(CALL)) nodes.push(...(callIn(part) ? [folded(callIn(part), part, "call")] : limited(part, FIRST_CHARS)));
    if (played.turn_rewards) nodes.push(make("p", { class: "muted" }, `reward ${shown(played.turn_rewards[turn])}`));
    const reply = upTo(end).trim();
    if (reply.length > FOLD_CHARS) nodes.push(folded(`${reply.slice(0, 80)} … ${reply.length.toLocaleString("en")} characters`, reply, "reply"));
    else if (reply) nodes.push(make("div", { class: "reply" }, ...visible(reply, filters.needle)));
  }
  return nodes;
}

// The summary of a call in the form of Qwen and Hermes, or of Llama; null for other text.
function callIn(text) {
  const inner = text.replace(/^<tool_call>|<\/tool_call>$/g, "").trim();
  try {
    const call = JSON.parse(inner);
    if (typeof call.name === "string") return `${call.name} ${JSON.stringify(call.arguments ?? call.parameters ?? {}).slice(0, 100)}`;
  } catch { /* no call, or one that cannot be read */ }
  return text.startsWith("<tool_call>") ? "a call that cannot be read" : null;
}

function folded(summary, text, style) {
  const open = Boolean(filters.needle) && text.toLowerCase().includes(filters.needle);
  return make("details", { class: style, open }, make("summary", {}, ...visible(summary)), ...limited(text, FIRST_CHARS));
}

const LOGPROB_UNIT = 0.01;

function logprobClass(surprise) {  // nats below 0
  return surprise < 0.105 ? "" : surprise < 0.51 ? "p1" : surprise < 1 ? "p2" : surprise < 2 ? "p3" : surprise < 4 ? "p4" : "p5";
}

function tokens(completion, most, body) {
  const { text, lengths, logprobs } = completion, nodes = [];
  const spans = completion.played ? completion.played.spans : [];
  let at = 0;
  const count = Math.min(lengths.length, most);
  for (let i = 0; i < count; i++) {
    const piece = text.slice(at, at + lengths[i]);
    at += lengths[i];
    const isRead = spans.some(([start, end]) => start <= i && i < end);
    const style = isRead ? "read" : logprobClass(logprobs[i] * LOGPROB_UNIT);
    const span = make("span", { class: "t " + style }, ...(lengths[i] ? visible(piece) : [make("span", { class: "bare", title: "A token without text: the end token, or part of a character" }, i === lengths.length - 1 ? "end" : "·")]));
    span.token = { i, piece, isRead, logprob: -logprobs[i] * LOGPROB_UNIT };
    nodes.push(span);
  }
  if (count < lengths.length) {
    const more = make("button", { class: "button", type: "button", onclick: () => body.replaceChildren(...tokens(completion, Infinity, body)) }, `Show the other ${(lengths.length - count).toLocaleString("en")} tokens`);
    nodes.push(" … ", more);
  }
  return nodes;
}

document.addEventListener("pointerover", (event) => {
  const span = event.target.closest?.(".t");
  if (!span || !span.token) return hideTip();
  const { i, piece, isRead, logprob } = span.token;
  const lines = [`token ${i + 1}  ${piece ? JSON.stringify(plainly(piece)) : ""}`, isRead ? "not the model's" : `log-prob ${logprob.toFixed(2)}, probability ${shown(Math.exp(logprob))}`];
  showTip(lines.join("\n"), event.clientX, event.clientY);
});

// Word by word, what only the other text has and what only this one has: Myers, 1986,
// doi:10.1007/BF01840446.
function difference(before, after) {
  const words = (text) => text.match(/\s+|[\p{L}\p{M}]+|\d|[^\s\p{L}\p{M}\d]/gu) || [];
  const a = words(before), b = words(after);
  if (a.length > DIFF_WORDS || b.length > DIFF_WORDS) return [make("p", { class: "muted" }, "Too long to be compared word by word."), ...limited(after, FIRST_CHARS)];
  const nodes = [];
  for (const [tag, text] of joined(edits(a, b))) nodes.push(...(tag ? [make(tag, {}, ...visible(text))] : visible(text)));
  return nodes;
}

function edits(a, b) {
  const most = a.length + b.length, furthest = new Map([[1, 0]]), trace = [];
  search: for (let d = 0; d <= most; d++) {
    trace.push(new Map(furthest));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && furthest.get(k - 1) < furthest.get(k + 1)) ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest.set(k, x);
      if (x >= a.length && x - k >= b.length) break search;
    }
    if (d > 800) return [...a.map((word) => ["del", word]), ...b.map((word) => ["ins", word])];
  }
  const found = [];
  let x = a.length, y = b.length;
  for (let d = trace.length - 1; d >= 0; d--) {
    const k = x - y, row = trace[d];
    const from = k === -d || (k !== d && row.get(k - 1) < row.get(k + 1)) ? k + 1 : k - 1;
    const startX = d === 0 ? 0 : row.get(from), startY = d === 0 ? 0 : startX - from;
    while (x > startX && y > startY && x > 0 && y > 0 && a[x - 1] === b[y - 1]) { x--; y--; found.push(["", a[x]]); }
    if (d > 0) { if (from === k + 1) { y--; found.push(["ins", b[y]]); } else { x--; found.push(["del", a[x]]); } }
  }
  return found.reverse();
}

function joined(parts) {
  const found = [];
  for (const [tag, text] of parts) {
    const last = found.at(-1);
    if (last && last[0] === tag) last[1] += text; else found.push([tag, text]);
  }
  return found;
}
