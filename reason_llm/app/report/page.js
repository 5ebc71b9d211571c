// The page: what there is to see of the runs, where, and how it follows a run that goes on.

let data = null;
const COLORS = [0, 1, 2, 3, 4, 5].map((i) => `var(--run-${i})`);
const PHASES = [
  ["sampling", "var(--run-0)"], ["learning", "var(--run-1)"], ["evaluation", "var(--run-2)"],
  ["scoring", "var(--clear)"], ["saving", "var(--run-3)"], ["buffer", "var(--run-4)"], ["other", "var(--run-5)"],
];
const number = (value) => shown(value, 3);
// As the console writes them.
const score = (value) => (Number.isFinite(value) && Math.abs(value) < 1000 ? value.toFixed(3) : shown(value));
const loss = (value) => shown(value, 4);
const gib = (value) => (Number.isFinite(value) ? value.toFixed(2) : "–") + " GiB";

// [key, title, note, format]; keys that no run has are left out.
const CHARTS = [
  ["Results", [
    ["score/reward", "Reward", "mean of the step's rollouts", score],
    ["eval/accuracy", "Held-out accuracy", "", percent],
    ["eval/*/accuracy", "", "held-out accuracy", percent],
    ["score/*", "", "mean of this reward", number],
    ["eval/pass_at_k", "Held-out pass@k", "one of the k samples is right", percent],
    ["eval/pair_accuracy", "Held-out pairs", "the chosen side ahead; dotted: chance, 50 %", percent],
    ["eval/loss", "Held-out loss", "", loss],
    ["eval/perplexity", "Held-out perplexity", "e to the loss of a token", loss],
    ["train/loss", "Loss", "of the step's rows, before they are learned", loss],
  ]],
  ["Pairs", [
    ["train/pair_accuracy", "Pairs in order", "the step's, before they are learned", percent],
    ["train/margin", "Margin", "chosen less rejected", number],
    ["eval/margin", "Held-out margin", "chosen less rejected", number],
    ["train/chosen_log_ratio", "Chosen log-ratio", "policy to reference, nats", number],
    ["train/rejected_log_ratio", "Rejected log-ratio", "policy to reference, nats", number],
    ["eval/chosen_log_ratio", "Held-out chosen log-ratio", "nats", number],
    ["eval/rejected_log_ratio", "Held-out rejected log-ratio", "nats", number],
    ["train/chosen_logprob", "Chosen log-prob", "nats per token", number],
    ["train/rejected_logprob", "Rejected log-prob", "nats per token", number],
    ["train/kl_baseline", "KL of the batch", "KTO's reference point, nats", number],
    ["train/chosen_reward", "Chosen reward", "", number],
    ["train/rejected_reward", "Rejected reward", "", number],
    ["eval/chosen_reward", "Held-out chosen reward", "", number],
    ["eval/rejected_reward", "Held-out rejected reward", "", number],
    ["eval/accuracy_chosen_longer", "Chosen side longer", "held-out pairs in order", percent],
    ["eval/accuracy_chosen_not_longer", "Chosen side not longer", "held-out pairs in order", percent],
    ["eval/accuracy_prefer_longer", "Prefer the longer", "held-out pairs in order without a model", percent],
    ["eval/length_correlation", "Reward and length", "correlation, held out", number],
  ]],
  ["Critic and teacher", [
    ["critic/explained_variance", "Explained variance", "of the returns by the values; 1 is all", number],
    ["critic/loss", "Value loss", "", number],
    ["critic/clip_fraction", "Value clip fraction", "tokens", percent],
    ["critic/value", "Value", "mean of the tokens", number],
    ["critic/grad_norm", "Critic's gradient norm", "before clipping", number],
    ["train/kl_per_completion", "KL of a completion", "to the reference, nats", number],
    ["train/teacher_kl", "KL to the teacher", "nats per token", number],
  ]],
  ["Completions", [
    ["sample/completion_tokens", "Length", "mean tokens", number],
    ["sample/truncated_fraction", "Truncated", "cut off by the limit", percent],
    ["train/entropy", "Entropy", "nats per token", number],
    ["score/groups_without_signal_fraction", "Groups without signal", "", percent],
    ["sample/groups_dropped", "Groups dropped", "by dynamic sampling", number],
    ["score/errors", "Scoring errors", "", number],
    ["score/timeouts", "Scoring timeouts", "", number],
  ]],
  ["Learning", [
    ["train/kl", "KL to the base", "nats per token", number],
    ["train/clip_fraction", "Clip fraction", "tokens", percent],
    ["train/sampler_mismatch_max", "Sampler mismatch", "max, in nats", number],
    ["train/sampler_kl", "Sampler KL", "to the learner, nats", number],
    ["train/grad_norm", "Gradient norm", "before clipping", number],
    ["train/learning_rate", "Learning rate", "", number],
    ["data/epoch", "Epochs", "passes over the rows", number],
  ]],
];
const NEVER_ZERO = new Set(["train/loss", "eval/loss", "eval/perplexity"]);
const samples = (run) => ["rl", "sample"].includes(run.stage);

function columnOf(run, key) {
  const column = run.columns[key];
  const steps = [], values = [];
  if (column) column.forEach((value, i) => { if (value !== null && (run.steps[i] > 0 || key.startsWith("eval/"))) { steps.push(run.steps[i]); values.push(Math.abs(value) < 1e-12 ? 0 : value); } });
  return { steps, values };
}

const isFlatZero = (runs, key) => runs.every((run) => columnOf(run, key).values.every((value) => value === 0));

function lineOf(run, i, key, color = COLORS[i % COLORS.length]) {
  const kind = key.startsWith("eval/") ? "points" : "line";
  return { label: plainly(run.label), color, again: Math.floor(i / COLORS.length), ...columnOf(run, key), kind };
}

function keysLike(pattern) {
  const all = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))];
  if (pattern === "score/*") {
    const names = [...new Set(data.runs.flatMap((run) => (run.rewards.length > 1 ? run.rewards.map((each) => each.name) : [])))];
    return names.map((name) => "score/" + name).filter((key) => all.includes(key));
  }
  if (pattern === "eval/*/accuracy") return all.filter((key) => /^eval\/.+\/accuracy$/.test(key));
  if (pattern === "train/loss" && data.runs.every(samples)) return [];  // around 0 whatever is learned
  return all.includes(pattern) ? [pattern] : [];
}

function metricChart(key, title, note, format, band, height = 130) {
  const lines = data.runs.map((run, i) => lineOf(run, i, key)).filter((line, i) => line.values.length && !hidden.has(i));
  if (/^eval\/(.+\/)?accuracy$/.test(key)) {
    if (!isAccuracy()) {
      if (key === "eval/accuracy") title = `Held-out ${judge()}`;
      note = `mean of ${judge()}, held out`;
      format = score;
    }
    note = [note, counted(data.runs, key), drawn(data.runs)].filter(Boolean).join(", ");
  }
  const name = title || key.replace(/^(score|eval)\//, "").replace(/\/accuracy$/, "");
  const warmup = data.runs.length === 1 && /^(critic|train|score)\//.test(key) ? data.runs[0].warmup_steps : 0;
  return chart({ key, title: plainly(name), note, format, lines, zero: !NEVER_ZERO.has(key), level: key.endsWith("/pair_accuracy") ? 0.5 : undefined, band, warmup, height, span: data.runs.length > 1 ? stepsOfAll() : null });
}

// How held-out answers are made.
const drawn = (runs) => [...new Set(runs.map((run) => columnOf(run, "eval/samples").values.at(-1) || 0))].map((k) => (k > 1 ? `mean of ${k} samples` : k ? "one sample" : "greedy")).join(" or ");
// How many problems an accuracy is of.
const counted = (runs, key = "eval/accuracy") => [...new Set(runs.map((run) => columnOf(run, key.replace(/accuracy$/, "problems")).values.at(-1) || 0))].filter(Boolean).map((count) => `on ${count.toLocaleString("en")} problem${count === 1 ? "" : "s"}`).join(" or ");
// What evaluation measures: a first reward that does not tell what is right is no accuracy.
const judge = (runs = data.runs) => [...new Set(runs.map((run) => run.judged_by))].join(" or ");
const isAccuracy = (runs) => judge(runs) === "accuracy";
const judged = (value, runs) => (isAccuracy(runs) ? percent(value) : score(value));

function warmupNote() {
  const steps = data.runs.length === 1 ? data.runs[0].warmup_steps : 0;
  return steps ? `; shaded: the first ${steps} steps, in which the critic alone learns` : "";
}

function go(values) { location.hash = new URLSearchParams(values).toString(); }

function notices(run) {
  return run.notices.map((text) => make("p", { class: "notice" }, ...visible(text)));
}

function overview(place) {
  const view = make("div"), several = data.runs.length > 1, run = data.runs[0];
  const head = make("div", { class: "head" }, make("h1", {}, ...(several ? [`${data.runs.length} runs`] : visible(run.label))));
  if (!several) head.append(make("p", {}, ...visible(summaryOf(run))));
  view.append(head, several ? comparison() : figures(run));
  for (const each of data.runs) view.append(...notices(each));
  view.append(alarms());
  const of = data.runs[Number(place.get("run") || 0)];
  const at = place.has("alarm") ? of.checks[Number(place.get("alarm"))] : place.has("ended") ? of.ended[Number(place.get("ended"))] : null;
  const drawn = new Set();
  for (const [heading, specs] of CHARTS) {
    const isFirst = heading === CHARTS[0][0], grid = make("div", { class: isFirst ? "charts large" : "charts" });
    for (const [pattern, title, note, format] of specs) {
      for (const key of keysLike(pattern)) {
        drawn.add(key);
        if (/^score\/(errors|timeouts)$|groups_dropped$|^train\/kl$/.test(key) && isFlatZero(data.runs, key)) continue;
        if (data.runs.every((run) => !columnOf(run, key).values.length)) continue;
        const shown = at && at.charts.includes(key);
        const figure = metricChart(key, title, note, format, shown ? at.steps : null, isFirst && innerWidth > 560 ? 190 : 130);
        if (shown) figure.classList.add("shown");
        grid.append(figure);
      }
    }
    const note = isFirst ? "steps on the x-axis; point at a chart to read all of them at that step" + warmupNote() : "";
    if (grid.children.length) view.append(make("section", {}, make("h2", {}, heading, note ? make("small", {}, note) : null), grid));
  }
  view.append(timeSection(), memorySection(drawn), otherSection(drawn, at));
  return view;
}

// Of a run; from the seventh on the colours come again, with broken lines.
const swatchOf = (i) => { const box = swatch(COLORS[i % COLORS.length]); box.classList.toggle("again", i >= COLORS.length); return box; };
const swatch = (color) => { const box = make("span", { class: "swatch" }); box.style.background = color; return box; };

function summaryOf(run) {
  const state = run.finished ? `finished after ${run.step} steps` : `at step ${run.step} of ${run.planned_steps}${run.left ? ", " + run.left : ""}`;
  return `${run.algorithm} on ${run.sources.join(" + ")} · ${run.model} · ${state}`;
}

function figures(run) {
  const list = make("dl", { class: "figures" });
  const add = (name, value, note = "") => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value, note ? make("small", {}, " " + note) : "")));
  const ends = (key) => { const { values } = columnOf(run, key); return values.length ? [values[0], values.at(-1)] : null; };
  const accuracy = ends("eval/accuracy"), reward = ends("score/reward"), length = ends("sample/completion_tokens");
  const change = (name, key, format, note = "") => { const found = ends(key); if (found) add(name, `${format(found[0])} → ${format(found[1])}`, note); };
  if (accuracy) add(plainly(`Held-out ${judge([run])}`), `${judged(accuracy[0], [run])} → ${judged(accuracy[1], [run])}`, [counted([run]), run.columns["eval/samples"] ? drawn([run]) : ""].filter(Boolean).join(", "));
  if (reward) add("Mean reward", `${score(reward[0])} → ${score(reward[1])}`);
  if (length) add("Completion length", `${number(length[0])} → ${number(length[1])}`, "tokens");
  const between = run.pairs ? `${percent(run.pairs.low)} to ${percent(run.pairs.high)}, of ${shownCount(run.pairs.count)}` : "";
  change("Held-out pairs", "eval/pair_accuracy", percent, between);
  change("Held-out loss", "eval/loss", loss);
  change("Held-out perplexity", "eval/perplexity", loss);
  if (!samples(run)) change("Loss", "train/loss", loss);
  const explained = ends("critic/explained_variance"), epochs = ends("data/epoch");
  if (explained) add("Explained variance", number(explained[1]), "at the end");
  change("KL to the teacher", "train/teacher_kl", number, "nats per token");
  if (epochs) add("Epochs", number(epochs[1]));
  const sum = (key) => columnOf(run, key).values.reduce((a, b) => a + b, 0);
  if (run.steps.length) {
    if (samples(run)) add("Sampled", shownCount(sum("sample/tokens")), "tokens");
    else add("Learned", shownCount(sum("train/tokens")), "tokens");
    add("Time", duration(total(run, "time/total_seconds")));
    const peaks = ["memory/sampling_peak_gib", "memory/learning_peak_gib"].flatMap((key) => columnOf(run, key).values);
    if (peaks.length) add("Peak memory", gib(Math.max(...peaks)));
  }
  return list;
}

function shownCount(value) {
  return value >= 1e9 ? shown(value / 1e9) + " B" : value >= 1e6 ? shown(value / 1e6) + " M" : Math.round(value).toLocaleString("en");
}

function total(run, key) {
  return (run.columns[key] || []).reduce((sum, value) => sum + (value || 0), 0);
}

function comparison() {
  const table = make("table", { class: "compare" }), head = make("tr");
  const last = (key, format) => (run) => { const { values } = columnOf(run, key); return values.length ? `${format(values[0])} → ${format(values.at(-1))}` : "–"; };
  const all = [
    ["Algorithm", (run) => run.algorithm],
    [plainly(`Held-out ${judge()}`), last("eval/accuracy", judged)],
    ["Mean reward", last("score/reward", score)],
    ["Held-out pairs", last("eval/pair_accuracy", percent)],
    ["Held-out loss", last("eval/loss", loss)],
    ["Length, tokens", last("sample/completion_tokens", number)],
    ["Steps", (run) => `${run.step} of ${run.planned_steps}`],
    ["Time", (run) => duration(total(run, "time/total_seconds"))],
    ["Alarms", (run) => run.checks.filter((check) => check.state === "alarm").length + (run.ended.length ? ` (${run.ended.length} before)` : "")],
  ];
  const shownColumns = all.filter(([, cell]) => data.runs.some((run) => cell(run) !== "–"));
  for (const [name] of [["Run"], ...shownColumns]) head.append(make("th", { scope: "col" }, name));
  table.append(head);
  data.runs.forEach((run, i) => {
    const row = shownColumns.map(([, cell]) => cell(run));
    table.append(make("tr", {}, make("td", {}, make("label", {}, shownBox(run, i), " ", swatchOf(i), ...visible(run.label))), ...row.map((text) => make("td", {}, text))));
  });
  const box = make("div", {}, make("div", { class: "scroll" }, table));
  const differing = data.differing || [];
  const options = make("table", { class: "compare differing" }, make("tr", {}, make("th", { scope: "col" }, "Option"), ...data.runs.map((run) => make("th", { scope: "col" }, ...visible(run.label)))));
  for (const each of differing) options.append(make("tr", {}, make("td", {}, each.option), ...each.values.map((text) => make("td", {}, ...visible(text)))));
  box.append(make("section", {}, make("h2", {}, "Options that differ"), differing.length ? make("div", { class: "scroll" }, options) : make("p", { class: "muted" }, "None: the runs have the same options.")));
  return box;
}

// Runs whose lines are not drawn.
const hidden = new Set();

function shownBox(run, i) {
  const box = make("input", { type: "checkbox", checked: !hidden.has(i), "aria-label": "Show " + plainly(run.label) });
  box.addEventListener("change", () => { if (box.checked) hidden.delete(i); else hidden.add(i); draw_view(); });
  return box;
}

// The first and the last step of all runs that are shown: one x-axis for all charts.
function stepsOfAll() {
  const steps = data.runs.filter((_, i) => !hidden.has(i)).flatMap((run) => (run.steps.length ? [run.steps[0], run.steps.at(-1)] : []));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : null;
}

function alarms() {
  const section = make("section", {}), raised = [];
  data.runs.forEach((run, r) => run.checks.forEach((check, i) => { if (check.state === "alarm") raised.push([run, r, check, i]); }));
  const box = make("div", { class: "alarms" });
  const ended = data.runs.flatMap((run, r) => run.ended.map((each, i) => [run, r, each, i]));
  const before = ended.length ? `, ${ended.length} raised before` : "";
  section.append(make("h2", {}, raised.length ? `${raised.length} alarm${raised.length > 1 ? "s" : ""}${before}` : before ? `No alarms now${before}` : "No alarms"));
  for (const [run, r, check, i] of raised) {
    const links = make("p", { class: "links" });
    if (check.charts.length) links.append(make("a", { class: "button", href: `#view=overview&run=${r}&alarm=${i}` }, "Show the curves"));
    if (check.groups.length) links.append(make("a", { class: "button", href: `#view=rollouts&run=${r}&alarm=${i}` }, `Show the rollouts`));
    box.append(make("div", { class: "alarm" }, make("h3", {}, check.title, data.runs.length > 1 ? make("span", {}, " · ", ...visible(run.label)) : ""), make("p", {}, ...visible(check.text)), make("p", { class: "do" }, ...visible(check.advice)), links));
  }
  if (raised.length) section.append(box);
  if (ended.length) {
    const past = make("div", { class: "alarms" });
    for (const [run, r, each, i] of ended) {
      const link = each.charts.length ? make("p", { class: "links" }, make("a", { class: "button", href: `#view=overview&run=${r}&ended=${i}` }, "Show the curves")) : "";
      past.append(make("div", { class: "alarm ended" }, make("h3", {}, each.title, make("span", {}, ` · raised at step ${each.step}, not now`), data.runs.length > 1 ? make("span", {}, " · ", ...visible(run.label)) : ""), make("p", {}, ...visible(each.text)), make("p", { class: "do" }, ...visible(each.advice)), link));
    }
    section.append(past);
  }
  for (const run of data.runs) {
    const quiet = run.checks.filter((check) => check.state !== "alarm");
    if (!quiet.length) continue;
    const clear = quiet.filter((check) => check.state === "clear").length;
    const table = make("table");
    for (const check of quiet) table.append(make("tr", {}, make("td", {}, make("span", { class: check.state === "clear" ? "ok" : "muted" }, check.state === "clear" ? "✓ " : "– "), check.title), make("td", { class: "muted" }, ...visible(check.text))));
    section.append(make("details", { class: "checks" }, make("summary", {}, make("b", {}, `${clear} check${clear === 1 ? "" : "s"} clear`), quiet.length > clear ? `, ${quiet.length - clear} not judged` : "", data.runs.length > 1 ? make("span", {}, " · ", ...visible(run.label)) : ""), table));
  }
  return section;
}

function phasesOf(run) {
  const steps = run.steps.filter((step) => step > 0), from = run.steps.length - steps.length;
  const value = (key, i) => (run.columns[key] || [])[i + from] || 0;
  const lines = PHASES.map(([name, color]) => ({ label: name, color, steps, kind: "line", values: steps.map((_, i) => (name === "other" ? 0 : value(`time/${name}_seconds`, i))) }));
  const other = lines.at(-1);
  other.values = steps.map((_, i) => Math.max(0, value("time/total_seconds", i) - lines.reduce((sum, line) => sum + line.values[i], 0)));
  return lines.filter((line) => line.values.some((v) => v > 0));
}

function timeSection() {
  const section = make("section", {}, make("h2", {}, "Time", make("small", {}, "seconds of each step, by phase; scoring is what was left of it after sampling")));
  for (const [i, run] of data.runs.entries()) {
    const lines = phasesOf(run);
    if (!lines.length || hidden.has(i)) continue;
    const sums = lines.map((line) => line.values.reduce((a, b) => a + b, 0)), all = sums.reduce((a, b) => a + b, 0) || 1;
    const bar = make("div", { class: "shares" }), legend = make("ul", { class: "legend" });
    lines.forEach((line, i) => {
      const part = make("span", { title: `${line.label} ${duration(sums[i])}` });
      part.style.background = line.color;
      part.style.flex = `${sums[i] / all} 0 0`;
      bar.append(part);
      legend.append(make("li", {}, swatch(line.color), make("b", {}, line.label), ` ${duration(sums[i])}, ${percent(sums[i] / all)}`));
    });
    section.append(make("p", { class: "of" }, data.runs.length > 1 ? make("b", {}, ...visible(run.label)) : ""), bar, legend,
      chart({ key: "time", title: "Each step", note: "seconds", format: (value) => shown(value) + " s", lines, stack: true, zero: true, wide: true, height: 140 }), replicasTable(run));
  }
  return section;
}

// A row for each replica of a run: what it did, and what that cost.
function replicasTable(run) {
  const found = new Map();
  for (const key of Object.keys(run.columns)) {
    const [, number, name] = /^replicas\/(\d+)\/(\w+)$/.exec(key) || [];
    if (number) found.set(number, { ...found.get(number), [name]: total(run, key) });
  }
  if (!found.size) return "";
  const table = make("table", { class: "compare replicas" }), head = make("tr");
  for (const name of ["Replica", "Sampling", "Learning", "of it waiting", "Sent"]) head.append(make("th", { scope: "col" }, name));
  table.append(head);
  const told = (value, format) => (value === undefined ? "–" : format(value));
  for (const [number, did] of [...found].sort((a, b) => a[0] - b[0])) {
    const cells = [number, told(did.sampling_seconds, duration), told(did.learning_seconds, duration), told(did.waiting_seconds, duration), told(did.sent_bytes, (value) => shown(value / 2 ** 20, 1) + " MiB")];
    table.append(make("tr", {}, ...cells.map((text) => make("td", {}, text))));
  }
  return make("div", { class: "scroll" }, table);
}

function memorySection(drawn) {
  const grid = make("div", { class: "charts" });
  for (const [phase, title] of [["sampling", "Memory, sampling"], ["learning", "Memory, learning"]]) {
    const lines = data.runs.flatMap((run, i) => {
      if (hidden.has(i)) return [];
      const planned = columnOf(run, `memory/${phase}_planned_gib`);
      return [lineOf(run, i, `memory/${phase}_peak_gib`), { label: data.runs.length > 1 ? "planned" : "planned", color: COLORS[i % COLORS.length], ...planned, kind: "plan" }];
    });
    if (data.runs.length === 1 && lines.length) lines[0].label = "peak";
    if (lines.some((line) => line.kind !== "plan" && line.values.length)) grid.append(chart({ key: "memory/" + phase, title, note: "GiB", format: (value) => shown(value, 2) + " GiB", lines, zero: true, height: 130 }));
    drawn.add(`memory/${phase}_peak_gib`).add(`memory/${phase}_planned_gib`);
  }
  for (const key of keysLike("sample/tokens_per_second")) grid.append(metricChart(key, "Sampling speed", "tokens per second", number));
  return make("section", {}, make("h2", {}, "Memory and speed"), grid);
}

function otherSection(drawn, at) {
  const rest = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))].filter((key) => !drawn.has(key) && !key.startsWith("time/") && !/^replicas\/\d/.test(key) && key !== "step" && key !== "sample/tokens_per_second").sort();
  const details = make("details", {}, make("summary", { class: "muted" }, `All other metrics (${rest.length})`));
  const fill = () => {
    if (details.open && details.children.length === 1) details.append(make("div", { class: "charts pad" }, ...rest.map((key) => metricChart(key, key, "", number, at && at.charts.includes(key) ? at.steps : null))));
  };
  details.addEventListener("toggle", fill);
  if (at && rest.some((key) => at.charts.includes(key))) { details.open = true; fill(); }
  return make("section", {}, details);
}
