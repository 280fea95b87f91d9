// Charts with uPlot: lines with bands over tokens, gaps with intervals, gaps over speed-ups.
// Names come from files: they become text nodes and never markup.

const data = await unpack(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const sync = uPlot.sync("report");
const SHOWN_FROM = 0.08; // the first part of a run is far above the rest: the axis of the loss does not show it

/** The object in a text: JSON, compressed, in base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// ---- numbers and colors

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number with a prefix, as short as it can be without losing digits that matter: 41.1 G, 250 k. */
function withPrefix(value, digits = 3) {
  for (const [size, prefix] of PREFIXES) if (Math.abs(value) >= size) return String(+(value / size).toPrecision(digits)) + " " + prefix;
  return String(+value.toPrecision(digits));
}

const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(4);
const FORMATS = {
  loss: (value) => value.toFixed(4),
  gap: signed,
  number: (value) => String(+value.toPrecision(4)),
  seconds: (value) => value >= 1 ? value.toPrecision(3) + " s" : (value * 1000).toPrecision(3) + " ms",
  bytes: (value) => withPrefix(value, 4) + "B",
  percent: (value) => (value * 100).toFixed(2) + "%",
  count: (value) => withPrefix(value, 4),
};
const TICKS = {
  seconds: (value) => value === 0 ? "0" : value >= 1 ? String(+value.toPrecision(4)) + " s" : String(+(value * 1000).toPrecision(4)) + " ms",
  bytes: (value) => value === 0 ? "0" : withPrefix(value, 4) + "B",
  percent: (value) => String(+(value * 100).toPrecision(4)) + "%",
  count: (value) => withPrefix(value, 4),
  number: (value) => String(+value.toPrecision(4)),
};
TICKS.loss = TICKS.gap = TICKS.number;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLORS = 12;
const color = (number) => style("--c" + number % COLORS);
const DASHES = [[], [7, 4], [2, 3]]; // for more variants than colors
const fade = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

const isPaper = () => document.documentElement.classList.contains("paper");

const LONGEST = 24; // characters of a name on an axis or beside a point
const shorten = (name) => name.length > LONGEST ? name.slice(0, LONGEST - 1) + "…" : name;

// ---- parts of a chart

function axes(format, xValues) {
  const font = "11.5px system-ui, sans-serif";
  const common = { stroke: style("--quiet"), font, grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1, size: 4 } };
  const tick = TICKS[format];
  return [
    { ...common, ...xValues },
    { ...common, size: axisSize, gap: 4, ...(tick ? { values: (u, splits) => splits.map((v) => v === null ? null : tick(v)) } : {}) },
  ];
}

/** The width of the vertical axis: that of its longest label. */
function axisSize(u, labels) {
  const longest = Math.max(0, ...(labels || []).map((label) => String(label ?? "").length));
  return 20 + longest * 6.6;
}

/** Draws a horizontal zone behind the lines, with its label. */
function drawZone(u, [low, high], label) {
  const { ctx, bbox } = u;
  const top = u.valToPos(high, "y", true), bottom = u.valToPos(low, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = fade(style("--zone"), 0.13);
  ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
  ctx.fillStyle = style("--quiet");
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.textBaseline = "top";
  if (label) ctx.fillText(label, bbox.left + bbox.width - 6 * devicePixelRatio, bottom + 3 * devicePixelRatio);
  ctx.restore();
}

function figure(element, title, note) {
  const plot = h("div", {});
  element.replaceChildren(h("figcaption", {}, h("b", {}, title), h("span", {}, note)), plot);
  return plot;
}

function showTip(u, rows, title) {
  if (u.cursor.left < 0 || !rows.length) {
    tip.hidden = true;
    return;
  }
  tip.replaceChildren(h("p", { class: "quiet" }, title), h("table", {}, rows));
  tip.hidden = false;
  const area = u.over.getBoundingClientRect();
  const left = area.left + u.cursor.left, top = area.top + u.cursor.top;
  const right = left + 16 + tip.offsetWidth < innerWidth ? left + 16 : left - tip.offsetWidth - 16;
  tip.style.left = Math.max(4, right) + "px";
  tip.style.top = Math.max(4, Math.min(top + 12, innerHeight - tip.offsetHeight - 6)) + "px";
}

const tipRow = (number, label, ...cells) => h("tr", {}, h("td", {}, h("span", { class: "chip" }, h("i", { class: "c" + number % COLORS }), label)), cells.map((cell) => h("td", {}, cell)));

// ---- lines over tokens

function lineChart(element, chart) {
  const plot = figure(element, chart.title, chart.note);
  const format = FORMATS[chart.format] || FORMATS.number;
  const columns = [chart.x], series = [{}], bands = [], owners = [null];
  for (const line of chart.lines) {
    const stroke = color(line.color);
    const dash = line.is_dashed ? [2, 3] : DASHES[Math.floor(line.color / COLORS) % DASHES.length];
    const index = columns.length;
    const few = chart.x.length <= 40;
    columns.push(line.values);
    owners.push(line);
    series.push({ label: line.label, stroke, width: line.is_dashed ? 1.2 : 1.8, dash, spanGaps: true, points: { show: line.has_points && few, size: 6, fill: stroke } });
    if (line.low) {
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      columns.push(line.high, line.low);
      owners.push(null, null);
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [index + 1, index + 2], fill: fade(stroke, chart.lines.length > 6 ? 0.1 : 0.17) });
    }
  }
  const xTicks = { values: (u, splits) => splits.map((v) => v === null ? null : withPrefix(v, 6)), label: chart.x_label, labelSize: 18, labelFont: "11.5px system-ui, sans-serif", labelGap: 0, size: 34 };
  const u = new uPlot({
    width: plot.clientWidth, height: isPaper() ? 190 : element.classList.contains("wide") ? 330 : 250, padding: [10, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync.key, setSeries: false }, focus: { prox: 18 }, points: { size: 6 } },
    focus: { alpha: 0.3 },
    scales: { x: { time: false }, y: { distr: chart.is_log ? 3 : 1, range: (u, low, high) => yRange(u, chart, low, high) } },
    axes: axes(chart.format, xTicks),
    series, bands,
    hooks: {
      drawClear: chart.zone ? [(u) => drawZone(u, chart.zone, chart.zone_label)] : [],
      setCursor: [(u) => {
        if (!u.over.matches(":hover")) return;
        const index = u.cursor.idx;
        if (index === null || index === undefined) return void (tip.hidden = true);
        const rows = owners.map((line, n) => [line, n]).filter(([line, n]) => line && u.series[n].show && line.values[index] !== null);
        rows.sort(([a], [b]) => b.values[index] - a.values[index]);
        showTip(u, rows.map(([line]) => tipRow(line.color, line.label, format(line.values[index]), line.low && line.low[index] !== null ? format(line.low[index]) + " to " + format(line.high[index]) : "")), withPrefix(chart.x[index], 4) + " " + chart.x_label);
      }],
    },
  }, columns, plot);
  u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  if (chart.lines.length > 1) element.append(legend(u, owners));
  return u;
}

/** The range of the vertical axis: all of what is shown, but not the first part of a run and not single outliers. */
function yRange(u, chart, low, high) {
  if (low === null || high === null) return [0, 1];
  const { min, max } = u.scales.x;
  const isWhole = min === null || max === null || min === undefined || (min <= chart.x[0] && max >= chart.x[chart.x.length - 1]);
  if (["seconds", "bytes", "count", "percent"].includes(chart.format)) return [0, high > 0 ? high * 1.08 : 1];
  if (chart.is_log) return uPlot.rangeLog(low, high, 10, false);
  if (isWhole && chart.x.length > 40 && (chart.format === "loss" || chart.format === "gap")) {
    const first = Math.floor(chart.x.length * SHOWN_FROM);
    const values = chart.lines.flatMap((line) => [line.values, ...(chart.format === "gap" && line.low ? [line.low, line.high] : [])].flatMap((column) => column.slice(first))).filter((value) => value !== null);
    if (values.length) {
      values.sort((a, b) => a - b);
      const cut = chart.format === "gap" ? 0.01 : 0;
      low = values[Math.floor(cut * (values.length - 1))];
      high = values[Math.ceil((1 - cut) * (values.length - 1))];
    }
  }
  if (chart.zone) { low = Math.min(low, chart.zone[0]); high = Math.max(high, chart.zone[1]); }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low - (chart.zone ? 2 : 1) * room, high + room];
}

/** The names of the lines. A click hides a line and its band. */
function legend(u, owners) {
  const keys = owners.map((line, n) => line && h("button", {
    type: "button", "aria-pressed": "true",
    click: (event) => {
      const show = !u.series[n].show;
      event.currentTarget.setAttribute("aria-pressed", String(show));
      u.setSeries(n, { show });
      if (line.low) for (const edge of [n + 1, n + 2]) u.setSeries(edge, { show });
    },
  }, h("i", { class: line.is_dashed || line.color >= COLORS ? "dashed" : null, style: "border-color: var(--c" + line.color % COLORS + ")" }), line.label));
  return h("div", { class: "legend" }, keys.filter(Boolean));
}

// ---- points with intervals

/** Draws an interval through each point, and a label beside it if there is one. */
function drawIntervals(u, points) {
  const { ctx } = u, ratio = devicePixelRatio;
  ctx.save();
  for (const point of points) {
    const x = u.valToPos(point.x, "x", true);
    ctx.strokeStyle = ctx.fillStyle = color(point.color);
    ctx.lineWidth = 2 * ratio;
    if (point.interval) {
      const [top, bottom] = [point.interval[1], point.interval[0]].map((value) => u.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, bottom);
      for (const end of [top, bottom]) {
        ctx.moveTo(x - 4 * ratio, end);
        ctx.lineTo(x + 4 * ratio, end);
      }
      ctx.stroke();
    }
    ctx.beginPath();
    ctx.arc(x, u.valToPos(point.y, "y", true), 4.5 * ratio, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.restore();
}

/** A chart of points. `xAxis` are options of the horizontal axis, `range` its limits. */
function pointChart(element, points, { title, note, xAxis, range, zone, zoneLabel, labels, height }) {
  const plot = figure(element, title, note);
  const ordered = [...points].sort((a, b) => a.x - b.x);
  const ends = ordered.flatMap((point) => [point.y, ...(point.interval || [])]).concat(zone || [], 0);
  const room = (Math.max(...ends) - Math.min(...ends)) * 0.07 || 0.01;
  const u = new uPlot({
    width: plot.clientWidth, height: isPaper() ? 230 : height, padding: [10, 20, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { time: false, range: () => range }, y: { range: () => [Math.min(...ends) - (zone ? 1.6 : 1) * room, Math.max(...ends) + room] } },
    axes: axes("gap", xAxis),
    series: [{}, { stroke: "transparent", points: { show: false } }],
    hooks: {
      drawClear: zone ? [(u) => drawZone(u, zone, zoneLabel)] : [],
      draw: [(u) => { drawIntervals(u, ordered); if (labels) drawLabels(u, ordered); }],
      setCursor: [(u) => {
        const index = u.cursor.idx;
        if (!u.over.matches(":hover") || index === null || index === undefined) return;
        const point = ordered[index];
        const interval = point.interval ? signed(point.interval[0]) + " to " + signed(point.interval[1]) : "";
        showTip(u, [tipRow(point.color, point.label, signed(point.y), interval)], point.note);
      }],
    },
  }, [ordered.map((point) => point.x), ordered.map((point) => point.y)], plot);
  u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  return u;
}

/** Writes the name of each point beside it, on the side where no other name is. */
function drawLabels(u, points) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11.5 * ratio}px system-ui, sans-serif`;
  ctx.fillStyle = style("--ink");
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const taken = points.map((point) => {
    const x = u.valToPos(point.x, "x", true);
    return { left: x - 5 * ratio, right: x + 5 * ratio, middle: u.valToPos(point.y, "y", true) };
  });
  for (const point of points) {
    const x = u.valToPos(point.x, "x", true), y = u.valToPos(point.y, "y", true), label = shorten(point.label), width = ctx.measureText(label).width;
    const size = 13 * ratio, gap = 9 * ratio;
    const places = [[x + gap, y], [x - gap - width, y], [x + gap, y - size], [x + gap, y + size], [x - gap - width, y - size], [x - gap - width, y + size]];
    const isFree = ([left, middle]) => left > bbox.left && left + width < bbox.left + bbox.width && !taken.some((t) => left < t.right && left + width > t.left && Math.abs(middle - t.middle) < size);
    const [left, middle] = places.find(isFree) || places[0];
    taken.push({ left, right: left + width, middle });
    ctx.fillText(label, left, middle);
  }
  ctx.restore();
}
