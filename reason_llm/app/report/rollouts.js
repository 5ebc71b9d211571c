// The rollouts view: a list of groups, filtered, and one group opened beside it.

const REWARD_COLORS = ["#8a8f98", "#5b86a8", "#3f9bb0", "#3fae8f", "#58bd5f"];
const FIRST_CHARS = 20000, FIRST_TOKENS = 4000, FIRST_GROUPS = 40, FIRST_CARDS = 16, DIFF_WORDS = 3000;
const blobs = new Map();      // run, step or view, and its version -> promise of its groups, opened
const filters = { run: 0, step: "", outcome: "", prompt: "", least: "", most: "", sort: "step", needle: "", hits: null };
const NO_FILTERS = { ...filters };
let listed = FIRST_GROUPS, openedAlarm = null;

function groupCount(run) { return run.rollouts.groups.step.length; }

async function openStep(run, step) {
  if (filters.view !== "rollouts") step = filters.view;  // all texts of one kind lie together
  const key = [run, step, step === filters.view ? data.version : ""].join("/");
  if (!blobs.has(key)) blobs.set(key, unpack(await packedStep(run, step)));
  return blobs.get(key);
}

async function packedStep(run, step) {
  if (data.live) {
    const answer = await fetch(`rollouts?run=${run}&step=${step}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.body;
  }
  const text = document.getElementById(`rollouts-${run}-${step}`).textContent.trim();
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Blob([bytes]).stream();
}

async function unpack(stream) {
  const buffer = await new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const count = header.tokens.reduce((sum, n) => sum + n, 0);
  const plane = (index) => uint16(buffer, 4 + size + 2 * count * index, count);
  const [lengths, logprobs] = [plane(0), plane(1)];
  let rollout = 0, token = 0;
  for (const group of header.groups) {
    group.completions = group.texts.map((text) => {
      const n = header.tokens[rollout], part = (numbers) => numbers.subarray(token, token + n);
      const found = { text, lengths: header.split[rollout] ? part(lengths) : null, logprobs: part(logprobs), played: header.played[rollout] };
      rollout += 1; token += n;
      return found;
    });
  }
  return header.groups;
}

function uint16(buffer, offset, count) {  // little-endian on every machine
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new Uint16Array(buffer, offset, count);
  const view = new DataView(buffer, offset, 2 * count);
  return Uint16Array.from({ length: count }, (_, i) => view.getUint16(2 * i, true));
}

// Where group `index` stands in its step's blob.
function placeInStep(run, index) {
  const steps = run.rollouts.groups.step;
  let first = index;
  while (first > 0 && steps[first - 1] === steps[index]) first -= 1;
  return index - first;
}

// From what is worth nothing, or the least below it, to the most; green is above 0 alone.
function rewardScale(run) {
  const { least, most } = run.rollouts;
  if (most > 0) return { low: Math.min(0, least), high: most, colors: REWARD_COLORS };
  return { low: least, high: most, colors: REWARD_COLORS.slice(0, most > least ? 3 : 1) };
}

function rewardColor(run, value) {
  const { low, high, colors } = rewardScale(run), place = high > low ? (value - low) / (high - low) : 0;
  return colors[Math.round(Math.max(0, Math.min(1, place)) * (colors.length - 1))];
}

// What the colours of the squares mean.
function rewardLegend(run) {
  const { low, high, colors } = rewardScale(run), legend = make("p", { class: "rewards" }, filters.view === "held_out" ? "A square is the answer of one evaluation, its colour the score: " : "A square is a completion, its colour the reward: "), scale = make("span", {}, shown(low));
  for (const color of colors) {
    const cell = make("i", { class: "cell" });
    cell.style.background = color;
    scale.append(cell);
  }
  if (high > low) scale.append(shown(high));
  legend.append(scale, " · ", make("span", {}, make("i", { class: "cell cut" }), "cut off by the limit"));
  return legend;
}

function cells(run, index) {
  const groups = run.rollouts.groups, box = make("span", { class: "cells" });
  groups.rewards[index].slice(0, 64).forEach((reward, i) => {
    const cut = groups.truncated[index][i];
    const found = filters.hits && filters.hits.has(index + "/" + i);
    const cell = make("i", { class: "cell" + (cut ? " cut" : "") + (found ? " found" : ""), title: `#${i + 1}: reward ${shown(reward)}${cut ? ", cut off" : ""}` });
    cell.style.background = rewardColor(run, reward);
    box.append(cell);
  });
  return box;
}

const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

function chosenGroups(run, alarm) {
  const groups = run.rollouts.groups;
  if (alarm) return alarm.groups;
  const found = [], needle = filters.prompt.toLowerCase();
  const least = filters.least === "" ? -Infinity : Number(filters.least), most = filters.most === "" ? Infinity : Number(filters.most);
  const bySearch = filters.hits ? new Set([...filters.hits].map((key) => Number(key.split("/")[0]))) : null;
  for (let i = 0; i < groupCount(run); i++) {
    if (filters.step !== "" && groups.step[i] !== Number(filters.step)) continue;
    if (bySearch && !bySearch.has(i)) continue;
    if (needle && !groups.preview[i].toLowerCase().includes(needle) && !groups.prompt[i].toLowerCase().includes(needle)) continue;
    const rewards = groups.rewards[i], first = groups.first[i];
    if ((least > -Infinity || most < Infinity) && !rewards.some((r) => r >= least && r <= most)) continue;
    const right = first.filter((v) => v > 0).length;
    if (filters.outcome === "right" && right < first.length) continue;
    if (filters.outcome === "wrong" && right > 0) continue;
    if (filters.outcome === "mixed" && (right === 0 || right === first.length)) continue;
    if (filters.outcome === "flat" && rewards.some((r) => r !== rewards[0])) continue;
    if (filters.outcome === "better" && !(first.at(-1) > first[0])) continue;
    if (filters.outcome === "worse" && !(first.at(-1) < first[0])) continue;
    if (filters.outcome === "cut" && !groups.truncated[i].some(Boolean)) continue;
    found.push(i);
  }
  const orders = {
    step: null,
    latest: (a, b) => groups.step[b] - groups.step[a] || a - b,
    high: (a, b) => mean(groups.rewards[b]) - mean(groups.rewards[a]),
    low: (a, b) => mean(groups.rewards[a]) - mean(groups.rewards[b]),
    long: (a, b) => Math.max(...groups.lengths[b]) - Math.max(...groups.lengths[a]),
    alike: (a, b) => groups.similarity[b] - groups.similarity[a],
  };
  return orders[filters.sort] ? found.sort(orders[filters.sort]) : found;
}

function filterBar(run, redraw) {
  const field = (label, input, style = "") => make("label", { class: style }, label, input);
  const select = (name, options) => {
    const input = make("select", { onchange: (event) => { filters[name] = event.target.value; listed = FIRST_GROUPS; redraw(); } });
    for (const [value, text] of options) input.append(make("option", { value, selected: String(filters[name]) === String(value) }, text));
    return input;
  };
  const typed = (name, attributes) => make("input", { ...attributes, value: filters[name], oninput: (event) => { filters[name] = event.target.value; listed = FIRST_GROUPS; redraw(); } });
  const steps = [...new Set(run.rollouts.groups.step)];
  const bar = make("div", { class: "filters" });
  if (data.runs.length > 1) {
    const input = make("select", { onchange: (event) => go({ view: filters.view, run: event.target.value }) });
    data.runs.forEach((each, i) => listOf(each, filters.view) && input.append(make("option", { value: i, selected: i === filters.run }, plainly(each.label))));
    bar.append(field("Run", input));
  }
  if (filters.view === "held_out") {
    bar.append(field("Outcome", select("outcome", [["", "any"], ["better", "better at the end"], ["worse", "worse at the end"], ["right", "always right"], ["wrong", "never right"], ["cut", "cut off"]])));
  } else if (filters.view === "rollouts") bar.append(
    field("Step", select("step", [["", "all steps"], ...steps.map((step) => [step, "step " + (step + 1)])])),
    field("Outcome", select("outcome", [["", "any"], ["mixed", "some right"], ["right", "all right"], ["wrong", "none right"], ["flat", "equal rewards"], ["cut", "cut off"]])),
    field("Sort by", select("sort", [["step", "first step first"], ["latest", "last step first"], ["high", "highest reward"], ["low", "lowest reward"], ["long", "longest"], ["alike", "most alike"]]), "grow-s"),
    field("Reward from", typed("least", { type: "number", step: "any", placeholder: shown(run.rollouts.least) })),
    field("to", typed("most", { type: "number", step: "any", placeholder: shown(run.rollouts.most) })),
  );
  bar.append(
    field("Prompt contains", typed("prompt", { type: "search" }), "grow"),
    searchField(run, redraw),
  );
  return bar;
}

function searchField(run, redraw) {
  const input = make("input", { type: "search", value: filters.needle, placeholder: "press Enter to search" });
  const label = make("label", { class: "grow" }, "Completion contains", input);
  input.addEventListener("change", () => search(run, input.value, label.firstChild, redraw));
  return label;
}

// Opens step after step, so that the page stays alive while it searches.
async function search(run, text, label, redraw) {
  const needle = filters.needle = text.toLowerCase(), groups = run.rollouts.groups;
  listed = FIRST_GROUPS;
  if (!needle) { filters.hits = null; redraw(); return; }
  const hits = new Set(), steps = [...new Set(groups.step)];
  let first = 0;
  for (const [i, step] of steps.entries()) {
    const opened = await openStep(filters.run, step);
    if (filters.needle !== needle) return;  // another search began
    opened.forEach((group, g) => group.completions.forEach((completion, c) => {
      if (completion.text.toLowerCase().includes(needle)) hits.add(first + g + "/" + c);
    }));
    first += opened.length;
    label.textContent = `Searched ${i + 1} of ${steps.length} steps`;
  }
  filters.hits = hits;
  redraw();
  label.textContent = `Found in ${hits.size.toLocaleString("en")} completions`;
}

// What a view lists of a run: its rollouts, or its answers to held-out problems.
const listOf = (run, view) => (view === "rollouts" ? samples(run) && run.rollouts : run.texts[view]);

function rolloutsView(place) {
  const name = place.get("view"), index = Math.min(data.runs.length - 1, place.has("run") ? Number(place.get("run")) : Math.max(0, data.runs.findIndex((run) => listOf(run, name))));
  if (filters.view !== name || filters.run !== index) Object.assign(filters, NO_FILTERS, { view: name, run: index });
  const of = data.runs[index], run = name === "rollouts" ? of : { ...of, rollouts: of.texts[name] || { groups: { step: [] } } };
  const view = make("div", { class: place.has("group") ? "open" : "" });
  if (!groupCount(run)) {
    view.append(runHead(run), ...notices(run), make("p", { class: "notice" }, name !== "rollouts" ? "There are none in this run." : samples(run) ? "No rollouts are archived in this run: run.keep_buffers_gib is 0, or they were deleted." : "This run learns from rows and samples none."));
    return view;
  }
  const alarm = place.has("alarm") ? run.checks[Number(place.get("alarm"))] : null;
  const list = make("div", { class: "list" }), detail = make("div", { class: "detail" });
  const redraw = () => drawList(run, list, alarm, place);
  view.append(runHead(run));
  if (alarm) {
    view.append(make("p", { class: "notice" }, "The rollouts behind “", alarm.title, "”: ", alarm.text, " ", make("a", { href: "#view=rollouts&run=" + filters.run }, "Show all rollouts")));
  } else view.append(filterBar(run, redraw));
  view.append(rewardLegend(run));
  view.append(make("div", { class: "split" }, list, detail));
  redraw();
  if (alarm !== openedAlarm) { openedAlarm = alarm; listed = FIRST_GROUPS; }
  const chosen = chosenGroups(run, alarm), group = place.has("group") ? Number(place.get("group")) : chosen[0];
  if (group !== undefined && group < groupCount(run)) openGroup(run, group, detail, place);
  return view;
}

function runHead(run) {
  const rollouts = run.rollouts, parts = [];
  const some = rollouts.count < rollouts.archived || rollouts.steps < rollouts.archives;
  if (filters.view === "held_out") parts.push(`${groupCount(run).toLocaleString("en")} held-out problems, answered ${rollouts.labels.join(", ")}`);
  else parts.push(`${(rollouts.count || 0).toLocaleString("en")} rollouts of ${(rollouts.steps || 0).toLocaleString("en")} steps`);
  if (filters.view === "held_out" && some) parts.push("an even sample");
  else if (some && filters.view === "rollouts") parts.push(`a sample, evenly chosen: the run has archives of ${rollouts.archives.toLocaleString("en")} steps, and those read hold ${rollouts.archived.toLocaleString("en")} rollouts`);
  const head = make("div", { class: "head" }, make("h1", {}, ...visible(run.label)), make("p", {}, parts.join("; ")));
  if (rollouts.count && rollouts.token_notice) head.append(make("p", { class: "notice" }, ...visible(rollouts.token_notice)));
  return head;
}

function drawList(run, list, alarm, place) {
  const groups = run.rollouts.groups, chosen = chosenGroups(run, alarm);
  const rollouts = chosen.reduce((sum, i) => sum + groups.rewards[i].length, 0);
  list.replaceChildren(make("p", { class: "count" }, `${chosen.length.toLocaleString("en")} ` + { rollouts: `groups, ${rollouts.toLocaleString("en")} rollouts`, held_out: "problems" }[filters.view]));
  for (const i of chosen.slice(0, listed)) {
    const target = new URLSearchParams({ view: filters.view, run: filters.run, group: i });
    if (alarm) target.set("alarm", place.get("alarm"));
    if (place.has("mode")) target.set("mode", place.get("mode"));
    list.append(make("a", { class: "item", href: "#" + target, "aria-current": String(i) === place.get("group") ? "true" : false },
      make("span", { class: "text", dir: "auto" }, ...visible(groups.preview[i])),
      filters.view === "rollouts" ? make("span", { class: "under" }, make("span", { class: "num" }, "step " + (groups.step[i] + 1)), cells(run, i), make("span", { class: "num" }, "mean " + shown(mean(groups.rewards[i]))))
        : make("span", { class: "under" }, filters.view === "held_out" ? cells(run, i) : "", make("span", {}, ...visible(groups.prompt[i])))));
  }
  if (chosen.length > listed) {
    list.append(make("button", { class: "button more", type: "button", onclick: () => { listed += 100; drawList(run, list, alarm, place); } }, `Show more (${(chosen.length - listed).toLocaleString("en")} left)`));
  }
  if (!chosen.length) list.append(make("p", { class: "muted" }, "Nothing fits these filters."));
}
