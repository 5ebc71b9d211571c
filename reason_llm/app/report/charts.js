// Line charts and stacked columns in SVG. All charts of a page share the step under the pointer.

const charts = new Set();
const MARGIN = { left: 44, right: 8, top: 8, bottom: 20 };

// {key, title, note, format, lines: [{label, color, steps, values, kind}], zero, height, stack, warmup}
// kind: line, points (few values), plan (dashed). With stack, the lines are summed up as columns.
function chart(spec) {
  const value = make("span", { class: "value" });
  const caption = make("figcaption", {}, make("b", {}, spec.title, spec.note ? make("small", {}, "  " + spec.note) : null), value);
  const drawing = svg("svg", { height: spec.height || 150, role: "img", tabindex: "0" });
  const figure = make("figure", { class: "chart" + (spec.wide ? " wide" : ""), id: "chart-" + spec.key }, caption, drawing);
  const state = { spec, figure, drawing, value, width: 0, cursor: null };
  const steps = spec.lines.flatMap((line) => line.steps);
  state.steps = [...new Set(steps)].sort((a, b) => a - b);
  drawing.setAttribute("aria-label", described(spec));
  drawing.addEventListener("pointermove", (event) => pointTo(state, event));
  drawing.addEventListener("pointerdown", (event) => pointTo(state, event));
  drawing.addEventListener("pointerleave", () => setCursor(null));
  drawing.addEventListener("blur", () => setCursor(null));
  drawing.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !state.steps.length) return;
    const at = state.cursor === null ? state.steps.length - 1 : nearest(state.steps, state.cursor);
    setCursor(state.steps[Math.max(0, Math.min(state.steps.length - 1, at + by))]);
    event.preventDefault();
  });
  charts.add(state);
  resized.observe(drawing);
  return figure;
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const state = [...charts].find((each) => each.drawing === entry.target);
    const width = Math.floor(entry.contentRect.width);
    if (state && width && width !== state.width) { state.width = width; draw(state); }
  }
});

function forgetCharts() {
  for (const state of charts) resized.unobserve(state.drawing);
  charts.clear();
}

function described(spec) {
  const parts = spec.lines.filter((line) => line.values.length && line.kind !== "plan").map((line) => {
    const last = line.values.length - 1;
    return `${line.label || ""} ${spec.format(line.values[0])} at step ${line.steps[0]}, ${spec.format(line.values[last])} at step ${line.steps[last]}`;
  });
  return `${spec.title}: ${parts.join("; ")}`;
}

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
}

function pointTo(state, event) {
  if (!state.x || !state.steps.length) return;
  const box = state.drawing.getBoundingClientRect();
  setCursor(state.steps[nearest(state.steps, state.x.back(event.clientX - box.left))]);
}

function setCursor(step) {
  for (const state of charts) {
    if (state.cursor === step) continue;
    state.cursor = step;
    if (state.width) drawCursor(state);
  }
}

function scale(from, to, start, end) {
  const span = to - from || 1;
  const place = (value) => start + ((value - from) / span) * (end - start);
  place.back = (position) => from + ((position - start) / (end - start)) * span;
  return place;
}

function ticks(from, to, most) {
  const span = to - from;
  if (!(span > 0)) return [from];
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(from / unit - 1e-9); i * unit <= to + unit * 1e-9; i++) found.push(Number((i * unit).toPrecision(12)));
  return found;
}

// As the chart's values are written, without the digits and units that every tick would repeat; with
// more digits where two ticks would read the same.
function tickTexts(spec, values) {
  const texts = values.map((value) => spec.format(value).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "").replace(/ (GiB|s)$/, ""));
  if (new Set(texts).size === texts.length) return texts;
  return values.map((value) => (spec.format === percent ? shown(100 * value, 3) + "%" : shown(value, 3)));
}

function bounds(spec, lines) {
  let low = Infinity, high = -Infinity;
  if (spec.stack) {
    low = 0;
    high = Math.max(0, ...totals(lines));
  } else {
    for (const line of lines) for (const value of line.values) { if (value < low) low = value; if (value > high) high = value; }
  }
  if (low === Infinity) return [0, 1];
  if (spec.level !== undefined) { low = Math.min(low, spec.level); high = Math.max(high, spec.level); }
  if (spec.zero && low > 0) low = 0;
  if (spec.zero && high < 0) high = 0;
  if (low === high) { const by = Math.abs(low) * 0.1 || 1; if (low !== 0 || !spec.zero) low -= spec.zero ? 0 : by; high += by; }
  const room = (high - low) * 0.04;
  return [spec.zero && low === 0 ? 0 : low - room, high + room];
}

function totals(lines) {
  return lines.length ? lines[0].values.map((_, i) => lines.reduce((sum, line) => sum + (line.values[i] || 0), 0)) : [];
}

function smoothed(values) {
  const half = Math.max(1, Math.round(values.length / 40)), found = [];
  for (let i = 0; i < values.length; i++) {
    const reach = Math.min(half, i, values.length - 1 - i);
    let sum = 0;
    for (let j = i - reach; j <= i + reach; j++) sum += values[j];
    found.push(sum / (2 * reach + 1));
  }
  return found;
}

function draw(state) {
  const { spec, drawing, width } = state, height = spec.height || 150;
  const lines = spec.lines;
  drawing.replaceChildren();
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [first, last] = spec.span || [state.steps[0] ?? 0, state.steps.at(-1) ?? 1];
  const half = spec.stack ? 0.5 : 0;
  const x = scale(first - half, last + half, MARGIN.left, width - MARGIN.right);
  const [low, high] = bounds(spec, lines);
  const y = scale(low, high, height - MARGIN.bottom, MARGIN.top);
  state.x = x; state.y = y;
  const levels = ticks(low, high, 4), texts = tickTexts(spec, levels);
  levels.forEach((value, i) => {
    drawing.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end" }, texts[i]));
  });
  for (const step of ticks(first, last, Math.max(2, Math.floor(width / 80))).filter(Number.isInteger)) {
    drawing.append(svg("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  if (spec.warmup) {
    const to = x(Math.min(last, spec.warmup + 0.5));
    if (to > MARGIN.left) drawing.append(svg("rect", { class: "warmup", x: MARGIN.left, y: MARGIN.top, width: to - MARGIN.left, height: height - MARGIN.top - MARGIN.bottom }));
  }
  if (spec.band) {
    const from = x(Math.max(first, spec.band[0]) - 0.5 * (spec.band[0] === spec.band[1])), to = x(Math.min(last, spec.band[1]) + 0.5 * (spec.band[0] === spec.band[1]));
    drawing.append(svg("rect", { class: "band", x: from, y: MARGIN.top, width: Math.max(3, to - from), height: height - MARGIN.top - MARGIN.bottom }));
  }
  if (spec.level !== undefined) drawing.append(svg("line", { class: "level", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(spec.level), y2: y(spec.level) }));
  if (spec.stack) drawColumns(state, x, y); else for (const line of lines) drawLine(drawing, line, x, y);
  state.marks = svg("g");
  drawing.append(state.marks);
  drawCursor(state);
}

function drawLine(drawing, line, x, y) {
  const path = (values, style) => {
    const parts = thinned(line.steps, values, x).map(([px, value], i) => (i ? "L" : "M") + px.toFixed(1) + " " + y(value).toFixed(1));
    const element = svg("path", { d: parts.join(""), class: style });
    element.style.stroke = line.color;
    if (line.again) element.style.strokeDasharray = `${6 / line.again} 3`;
    drawing.append(element);
  };
  const isNoisy = line.kind === "line" && line.values.length > 24;
  if (isNoisy) path(line.values, "raw");
  path(isNoisy ? smoothed(line.values) : line.values, line.kind);
  if (line.kind === "points" && line.values.length <= 60 || line.values.length === 1) {
    line.values.forEach((value, i) => {
      const dot = svg("circle", { cx: x(line.steps[i]), cy: y(value), r: 3 });
      dot.style.fill = line.color;
      drawing.append(dot);
    });
  }
}

// No more than the least and the most of each pixel column.
function thinned(steps, values, x) {
  if (values.length < 3000) return values.map((value, i) => [x(steps[i]), value]);
  const found = [];
  let column = null;
  values.forEach((value, i) => {
    const px = Math.round(x(steps[i]));
    if (!column || column[0] !== px) { if (column) found.push([column[0], column[1]], [column[0], column[2]]); column = [px, value, value]; }
    column = [px, Math.min(column[1], value), Math.max(column[2], value)];
  });
  found.push([column[0], column[1]], [column[0], column[2]]);
  return found;
}

function drawColumns(state, x, y) {
  const lines = state.spec.lines, count = lines[0].steps.length;
  const each = Math.max(1, Math.ceil(count / 400));  // neighbours are averaged where columns get too thin
  const width = Math.max(0.6, (x(lines[0].steps[0] + each) - x(lines[0].steps[0])) - (count > 120 ? 0 : 1));
  for (let from = 0; from < count; from += each) {
    let below = 0;
    for (const line of lines) {
      const part = line.values.slice(from, from + each);
      const value = part.reduce((sum, v) => sum + (v || 0), 0) / part.length;
      const rect = svg("rect", { x: x(line.steps[from] - 0.5), width, y: y(below + value), height: Math.max(0, y(below) - y(below + value)) });
      rect.style.fill = line.color;
      state.drawing.append(rect);
      below += value;
    }
  }
}

function drawCursor(state) {
  const { spec, marks, x, y, cursor, value } = state;
  if (!marks) return;
  marks.replaceChildren();
  const several = spec.lines.length > 1;
  const at = cursor === null ? null : cursor;
  const texts = [], isColored = new Set(spec.lines.map((line) => line.color)).size > 1;
  const add = (line, text) => {
    const part = make("span", {}, text);
    if (isColored) part.style.color = line.color;
    texts.push(part);
  };
  for (const line of spec.lines) {
    if (!line.values.length) continue;
    const index = at === null ? line.values.length - 1 : nearest(line.steps, at);
    if (at !== null && line.kind !== "points" && line.steps[index] !== at) continue;
    if (several && at === null && (spec.stack || spec.lines.length > 2)) continue;
    add(line, (line.kind === "plan" && texts.length ? "of " : "") + spec.format(line.values[index]));
    if (at !== null && !spec.stack) {
      const dot = svg("circle", { cx: x(line.steps[index]), cy: y(line.values[index]), r: 3.2 });
      dot.style.fill = line.color;
      marks.append(dot);
    }
  }
  if (at !== null) {
    marks.prepend(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: MARGIN.top, y2: (spec.height || 150) - MARGIN.bottom }));
    texts.unshift(make("span", {}, "step " + at.toLocaleString("en")));
  }
  value.replaceChildren(...texts.slice(0, 9).flatMap((text, i) => (i ? [" ", text] : [text])));
}
