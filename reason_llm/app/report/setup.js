// What the runs were made of, which view is shown, and how the page follows a run that goes on.

function setup() {
  const view = make("div");
  data.runs.forEach((run) => {
    view.append(make("div", { class: "head" }, make("h1", {}, ...visible(run.label)), make("p", {}, ...visible(summaryOf(run)))), ...notices(run));
    view.append(make("section", {}, make("h2", {}, samples(run) ? "Algorithm" : "Objective", make("small", {}, run.algorithm)), make("p", { class: "idea" }, ...visible(run.idea)), make("p", { class: "muted" }, ...visible(run.source)), make("p", { class: "muted" }, "Its equation, term by term: docs/algorithms.md, section Equations.")));
    const start = run.starts.at(-1);
    const columns = make("div", { class: "columns" });
    if (start) columns.append(make("div", {}, dataSection(start.data), planSection(run, start.plan)), machineSection(run, start));
    else columns.append(make("p", { class: "notice" }, "This run recorded no environment.json: versions, machine and data counts are not known."));
    view.append(columns, make("section", {}, make("h2", {}, "Config", make("small", {}, "all options of the run")), make("pre", { class: "config", tabindex: "0" }, ...visible(run.config))));
  });
  return view;
}

function facts(rows) {
  const list = make("dl", { class: "facts" });
  for (const [name, value] of rows) if (value !== null && value !== undefined && value !== "") list.append(make("dt", {}, name), make("dd", {}, ...visible(String(value))));
  return list;
}

function table(heads, rows) {
  const made = make("table", { class: "plain" }, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head))));
  for (const row of rows) made.append(make("tr", { class: row.sum ? "sum" : null }, ...row.map((cell) => make("td", {}, ...visible(String(cell))))));
  return make("div", { class: "scroll" }, made);
}

function dataSection(counts) {
  const count = (use) => (each) => [use, each.name ? `${each.name}: ${each.source}` : each.source, each.rows.toLocaleString("en"), each.prompts.toLocaleString("en"), Object.entries(each.left_out).map(([why, n]) => `${n} by ${why}`).join(", ") || "none"];
  const sets = table(["", "Set", "Rows", "Taken", "Left out"], [...counts.training.map(count("training")), ...counts.held_out.map(count("held out"))]);
  sets.firstChild.classList.add("sets");
  const section = make("section", {}, make("h2", {}, "Data"), sets);
  if (counts.in_both) section.append(make("p", { class: "notice" }, `${counts.in_both} training rows ask what a held-out row asks.`));
  return section;
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const clock = (time) => time.replace(/^(\S{10})T(\S{8})\+00:00$/, "$1 $2 UTC");

function machineSection(run, start) {
  const { machine, packages, reason_llm } = start;
  const section = make("section", {}, make("h2", {}, "Machine and versions"), facts([
    ["Started", clock(run.starts[0].time)], ["Resumed", run.starts.slice(1).map((each) => `after step ${each.step}, ${clock(each.time)}`).join("; ")],
    ["GPU", machine.gpu ? `${machine.gpu}, ${machine.gpu_gib} GiB, CUDA ${machine.cuda}` : "none"], ["Processor", `${machine.processor}, ${plural(machine.cores, "core")}, ${plural(machine.threads, "PyTorch thread")}`],
    ["Host memory", `${machine.host_gib} GiB`], ["System", machine.system], ["Python", machine.python],
    ["reason_llm", reason_llm],
    ["Packages", Object.entries(packages).map(([name, version]) => `${name} ${version}`).join(", ")],
  ]));
  return section;
}

function planSection(run, lines) {
  const size = (bytes) => (bytes ? (bytes >= 0.1 * 2 ** 30 ? (bytes / 2 ** 30).toFixed(2) + " GiB" : (bytes / 2 ** 20).toFixed(1) + " MiB") : "–");
  const sum = (phase) => lines.reduce((all, line) => all + line[phase], 0);
  const peak = (phase) => { const { values } = columnOf(run, `memory/${phase}_peak_gib`); return values.length ? Math.max(...values).toFixed(2) + " GiB" : "–"; };
  const rows = lines.map((line) => [line.name, size(line.sampling), size(line.learning)]);
  const totals = ["total planned", size(sum("sampling")), size(sum("learning"))];
  totals.sum = true;
  rows.push(totals, ["measured peak", peak("sampling"), peak("learning")]);
  return make("section", {}, make("h2", {}, "Memory plan"), table(["", "Sampling", "Learning"], rows));
}

const VIEWS = { overview, rollouts: rolloutsView, held_out: rolloutsView, setup };

function draw_view() {
  const place = new URLSearchParams(location.hash.slice(1)), name = VIEWS[place.get("view")] ? place.get("view") : "overview";
  const main = document.getElementById("main"), last = main.dataset.view;
  const listTop = scrollY;
  forgetCharts();
  hideTip();
  main.replaceChildren(VIEWS[name](place));
  main.dataset.view = name;
  for (const tab of document.querySelectorAll("#tabs a")) {
    const of = tab.getAttribute("href").slice(6);
    tab.hidden = VIEWS[of] === rolloutsView && !data.runs.some((run) => listOf(run, of));
    if (tab.getAttribute("href") === "#view=" + name) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current");
  }
  const figure = main.querySelector(".chart.shown");
  if (figure) figure.scrollIntoView({ block: "center" });
  else if (last !== name || place.has("group") && innerWidth <= 900) scrollTo(0, 0);
  else scrollTo(0, listTop);
}

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  document.documentElement.className = theme;
  document.getElementById("theme").textContent = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme];
}

async function follow() {
  const sign = document.getElementById("live");
  sign.hidden = false;
  let version = null;
  for (;;) {
    try {
      const answer = await fetch("data" + (version === null ? "" : "?after=" + version), { cache: "no-store" });
      if (answer.status === 200) {
        const fresh = await answer.json();
        version = fresh.version;
        const isFirst = data === null;
        data = fresh;
        if (isFirst || !document.querySelector(".detail:hover, input:focus, select:focus")) draw_view();
      } else if (answer.status !== 204) throw new Error("the server answered " + answer.status + ": " + (await answer.text()));
      sign.className = "";
      sign.textContent = data.runs.every((run) => run.finished) ? "finished" : "following the run";
    } catch (error) {
      sign.className = "lost";
      sign.textContent = error instanceof TypeError ? "the server is gone" : plainly(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function begin() {
  let theme = "";
  setTheme(theme);
  document.getElementById("theme").addEventListener("click", () => setTheme(theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
  addEventListener("hashchange", () => { if (data) draw_view(); });
  addEventListener("scroll", hideTip, { passive: true });
  const embedded = document.getElementById("data");
  if (embedded) {
    data = JSON.parse(embedded.textContent);
    draw_view();
    performance.mark("shown");
  } else follow();
}

begin();
