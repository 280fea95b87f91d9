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
  seconds: (value) => value >= 0.9995 ? value.toPrecision(3) + " s" : (value * 1000).toPrecision(3) + " ms",
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

const LONGEST = 24; // characters of a name beside a point

/** A name without its middle if it is long: names of variants differ at their beginning or at their end. */
function shorten(name, longest = LONGEST) {
  const end = Math.floor(longest / 3);
  return name.length > longest ? name.slice(0, longest - 1 - end) + "…" + name.slice(-end) : name;
}

const areDistinct = (names) => new Set(names).size === names.length;

const FONT = "12px system-ui, sans-serif"; // whole pixels: uPlot scales no other font with the screen
const measuring = document.createElement("canvas").getContext("2d");

/** The width of a text in a chart, in CSS pixels. */
function textWidth(text) {
  measuring.font = FONT;
  return measuring.measureText(text).width;
}

// ---- parts of a chart

function axes(format, xValues) {
  const common = { stroke: style("--quiet"), font: FONT, grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1, size: 4 } };
  const tick = TICKS[format];
  return [
    { ...common, ...xValues },
    { ...common, size: axisSize, gap: 4, ...(tick ? { values: (u, splits) => splits.map((v) => v === null ? null : tick(v)) } : {}) },
  ];
}

/** The width of the vertical axis: that of its longest label. */
function axisSize(u, labels) {
  const longest = Math.max(0, ...(labels || []).map((label) => String(label ?? "").length));
  return 20 + longest * 6.6; // uPlot adds the size of a label
}

/** Draws the zone between two values, or only its label, which stands below it and above the grid. */
function drawZone(u, [low, high], label) {
  const { ctx, bbox } = u;
  const isForest = u.scales.y.ori === 0;
  const [first, last] = [low, high].map((value) => u.valToPos(value, "y", true));
  const top = isForest ? bbox.top : last, bottom = isForest ? bbox.top + bbox.height : first;
  const left = isForest ? first : bbox.left, right = isForest ? last : bbox.left + bbox.width;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = fade(style("--zone"), 0.13);
  if (!label) ctx.fillRect(left, top, right - left, bottom - top);
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

// ---- what the switches choose

const view = { x: data.clock.unit, smooth: 0, isLog: false };
const HOUR = 3600;
const TIME_UNITS = [["hours", HOUR, 2 * HOUR], ["minutes", 60, 180], ["seconds", 1, 0]];

/** The units that the horizontal axis can have. */
function xUnits() {
  const { unit, tokens_per_step, seconds } = data.clock;
  const names = Object.keys(data.colors);
  return [unit, ...(unit === "tokens" && tokens_per_step ? ["steps"] : []), ...(names.every((name) => name in seconds) ? ["time"] : [])];
}

/** Places in the unit of the clock: tokens, or steps if tokens are not known. */
function clockPlaces(chart) {
  const isOther = chart.x_label !== data.clock.unit;
  return isOther && data.clock.tokens_per_step ? chart.x.map((x) => x * data.clock.tokens_per_step) : chart.x;
}

/** The value of a curve through the origin at a place, on the straight line between two points; null after its end. */
function interpolate(xs, ys, x) {
  const next = xs.findIndex((each) => each >= x);
  if (next < 0 || ys[next] === null) return null;
  const [x0, y0] = next ? [xs[next - 1], ys[next - 1]] : [0, 0];
  return y0 + (ys[next] - y0) * (x - x0) / (xs[next] - x0 || 1);
}

/** Means over the places around each place. */
function smoothen(values, reach) {
  if (!reach || !values) return values;
  return values.map((value, n) => {
    const near = values.slice(Math.max(0, n - reach), n + reach + 1).filter((each) => each !== null);
    return value === null ? null : near.reduce((a, b) => a + b, 0) / near.length;
  });
}

/** The chart as the switches ask for it. Over time, each line has places of its own. */
function applyView(chart) {
  const reach = chart.lines.some((line) => line.has_points) ? 0 : view.smooth;
  const lines = chart.lines.map((line) => ({ ...line, values: smoothen(line.values, reach), low: smoothen(line.low, reach), high: smoothen(line.high, reach) }));
  const canBeLog = chart.format !== "gap" && lines.every((line) => line.values.every((value) => value === null || value > 0));
  const shown = { ...chart, lines, is_log: chart.is_log || (view.isLog && canBeLog) };
  if (view.x === chart.x_label) return shown;
  const places = clockPlaces(chart);
  if (view.x === "steps") return { ...shown, x: places.map((x) => x / data.clock.tokens_per_step), x_label: "steps" };
  if (view.x === data.clock.unit) return { ...shown, x: places, x_label: view.x };
  const names = Object.keys(data.colors), longest = Math.max(...Object.values(data.clock.seconds).flat());
  const [label, size] = TIME_UNITS.find(([, , least]) => longest >= least);
  const tables = lines.map((line) => {
    const name = names.find((each) => data.colors[each] === line.color) ?? names[0];
    const seconds = data.clock.seconds[names.length > 1 ? name : names[0]];
    const rows = places.map((x, n) => [interpolate(data.clock.x, seconds, x), line.values[n], line.low?.[n] ?? null, line.high?.[n] ?? null]).filter(([x]) => x !== null);
    return [0, 1, 2, 3].map((column) => rows.map((row) => column ? row[column] : row[0] / size));
  });
  const x = [...new Set(tables.flatMap(([xs]) => xs))].sort((a, b) => a - b);
  const spread = ([xs], column) => { const at = new Map(xs.map((each, n) => [each, column[n]])); return x.map((each) => at.get(each) ?? null); };
  const moved = lines.map((line, n) => ({ ...line, values: spread(tables[n], tables[n][1]), ...(line.low ? { low: spread(tables[n], tables[n][2]), high: spread(tables[n], tables[n][3]) } : {}) }));
  return { ...shown, x, x_label: label, lines: moved, isJoined: true };
}

/** The value of a column at an index. Where lines have places of their own, it is the last one before. */
function valueAt(column, index, isJoined) {
  if (column[index] !== null || !isJoined || column.slice(index).every((value) => value === null)) return column[index];
  return column.slice(0, index).findLast((value) => value !== null) ?? null;
}

// ---- lines over tokens

/** Distances of the ticks: half a step or token does not exist. */
const WHOLE_STEPS = Array.from({ length: 16 }, (_, n) => [1, 2, 2.5, 5].map((v) => v * 10 ** n)).flat().filter(Number.isInteger);

function lineChart(element, original) {
  const chart = applyView(original);
  const plot = figure(element, chart.title, [chart.note, cutNote(chart)].filter(Boolean).join("; "));
  const format = FORMATS[chart.format] || FORMATS.number;
  const columns = [chart.x], series = [{}], bands = [], owners = [null];
  for (const line of chart.lines) {
    const stroke = color(line.color);
    const dash = line.is_dashed ? [2, 3] : DASHES[Math.floor(line.color / COLORS) % DASHES.length];
    const index = columns.length;
    const few = original.x.length <= 40;
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
  const xTicks = { ...(chart.isJoined ? {} : { incrs: WHOLE_STEPS }), values: (u, splits) => splits.map((v) => v === null ? null : withPrefix(v, 6)), label: chart.x_label, labelSize: 18, labelFont: FONT, labelGap: 0, size: 34 };
  const few = chart.lines.length > 1 ? owners.map((line, n) => [line, n]).filter(([line]) => line?.has_points) : [];
  const named = few.length <= 14 && original.x.length <= 40 ? few : [];
  const room = named.length ? 24 + Math.max(...named.map(([line]) => textWidth(shorten(line.label)))) : 24;
  const u = new uPlot({
    width: plot.clientWidth, height: isPaper() ? 190 : element.classList.contains("wide") ? 330 : 250, padding: [10, room, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync.key, setSeries: false }, focus: { prox: 18 }, points: { size: 6 } },
    focus: { alpha: 0.3 },
    scales: { x: { time: false }, y: { distr: chart.is_log ? 3 : 1, range: (u, low, high) => yRange(u, chart, low, high) } },
    axes: axes(chart.format, xTicks),
    series, bands,
    hooks: {
      drawClear: chart.zone ? [(u) => drawZone(u, chart.zone)] : [],
      draw: [(u) => { drawEnds(u, named); if (chart.zone && chart.zone_label) drawZone(u, chart.zone, chart.zone_label); }],
      setCursor: [(u) => {
        if (!u.over.matches(":hover")) return;
        const index = u.cursor.idx;
        if (index === null || index === undefined) return void (tip.hidden = true);
        const at = (column) => valueAt(column, index, chart.isJoined);
        const rows = owners.map((line, n) => [line, n]).filter(([line, n]) => line && u.series[n].show && at(line.values) !== null);
        rows.sort(([a], [b]) => at(b.values) - at(a.values));
        showTip(u, rows.map(([line]) => tipRow(line.color, line.label, format(at(line.values)), line.low && at(line.low) !== null ? format(at(line.low)) + " to " + format(at(line.high)) : "")), withPrefix(chart.x[index], 4) + " " + chart.x_label);
      }],
    },
  }, columns, plot);
  u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  if (chart.lines.length > 1) element.append(legend(u, owners));
  return u;
}

/** The values that the vertical axis shows of the whole run: not its first part, and of gaps not single outliers. */
function cutRange(chart) {
  if (chart.x.length <= 40 || chart.is_log || !["loss", "gap"].includes(chart.format)) return null;
  const isGap = chart.format === "gap", first = Math.floor(chart.x.length * SHOWN_FROM), cut = isGap ? 0.01 : 0;
  const values = chart.lines.flatMap((line) => [line.values, ...(isGap && line.low ? [line.low, line.high] : [])].flatMap((column) => column.slice(first))).filter((value) => value !== null).sort((a, b) => a - b);
  return values.length ? [values[Math.floor(cut * (values.length - 1))], values[Math.ceil((1 - cut) * (values.length - 1))]] : null;
}

/** Says what the axis does not show; empty if it shows everything. */
function cutNote(chart) {
  const range = cutRange(chart), format = FORMATS[chart.format];
  const values = range ? chart.lines.flatMap((line) => line.values).filter((value) => value !== null) : [];
  const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (!range || (low >= range[0] && high <= range[1])) return "";
  return `the axis cuts off the start, where values reach ${format(high > range[1] ? high : low)}`;
}

/** The range of the vertical axis. */
function yRange(u, chart, low, high) {
  if (low === null || high === null) return [0, 1];
  const { min, max } = u.scales.x;
  const isWhole = min === null || max === null || min === undefined || (min <= chart.x[0] && max >= chart.x[chart.x.length - 1]);
  if (chart.is_log) return uPlot.rangeLog(low, high, 10, false);
  if (["seconds", "bytes", "count", "percent"].includes(chart.format)) return [0, high > 0 ? high * 1.08 : 1];
  if (isWhole) [low, high] = cutRange(chart) ?? [low, high];
  if (chart.zone) { low = Math.min(low, chart.zone[0]); high = Math.max(high, chart.zone[1]); }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low - (chart.zone ? 2 : 1) * room, high + room];
}

/** Writes the name of each line that ends at the right edge beside its end; names do not overlap. */
function drawEnds(u, names) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, row = 13 * ratio, bottom = bbox.top + bbox.height;
  const ends = names.map(([line, n]) => {
    const last = u.data[n].findLastIndex((value) => value !== null);
    return { line, n, x: u.valToPos(u.data[0][last], "x", true), y: u.valToPos(u.data[n][last], "y", true) };
  }).filter(({ n, x, y }) => u.series[n].show && Math.abs(x - bbox.left - bbox.width) < 2 && y >= bbox.top && y <= bottom).sort((a, b) => a.y - b.y);
  ends.forEach((end, n) => { end.place = Math.max(end.y, n ? ends[n - 1].place + row : 0); });
  ends.reduceRight((below, end) => (end.place = Math.min(end.place, below - row)), bottom + row);
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const { line, x, y, place } of ends) {
    const left = bbox.left + bbox.width + 20 * ratio;
    ctx.strokeStyle = fade(color(line.color), 0.6);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x + 4 * ratio, y);
    ctx.lineTo(left - 4 * ratio, place);
    ctx.stroke();
    ctx.fillStyle = style("--ink");
    ctx.fillText(shorten(line.label), left, place);
  }
  ctx.restore();
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
  }, h("i", { class: line.is_dashed || line.color >= COLORS ? "dashed" : null, style: `--mark: var(--c${line.color % COLORS}); border-color: var(--mark)` }), line.label));
  return h("div", { class: "legend" }, keys.filter(Boolean));
}

// ---- points with intervals

/** Draws each point and its interval. */
function drawIntervals(u, points) {
  const { ctx } = u, ratio = devicePixelRatio, isForest = u.scales.y.ori === 0;
  const place = (x, y) => isForest ? [y, x] : [x, y];
  ctx.save();
  for (const point of points) {
    const x = u.valToPos(point.x, "x", true);
    ctx.strokeStyle = ctx.fillStyle = color(point.color);
    ctx.lineWidth = 2 * ratio;
    if (point.interval) {
      const ends = point.interval.map((value) => u.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(...place(x, ends[0]));
      ctx.lineTo(...place(x, ends[1]));
      for (const end of ends) {
        ctx.moveTo(...place(x - 4 * ratio, end));
        ctx.lineTo(...place(x + 4 * ratio, end));
      }
      ctx.stroke();
    }
    ctx.beginPath();
    ctx.arc(...place(x, u.valToPos(point.y, "y", true)), 4.5 * ratio, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.restore();
}

/** A chart of points. `xAxis` are options of the first axis, `range` its limits. In a forest, this axis goes down. */
function pointChart(element, points, { title, note, xAxis, yLabel, range, zone, zoneLabel, hasNames, height, isForest }) {
  const plot = figure(element, title, note);
  const ordered = [...points].sort((a, b) => a.x - b.x);
  const ends = ordered.flatMap((point) => [point.y, ...(point.interval || [])]).concat(zone || [], 0);
  const room = (Math.max(...ends) - Math.min(...ends)) * 0.07 || 0.01;
  const key = hasNames ? h("ul", { class: "key" }) : null;
  const [first, second] = axes("gap", xAxis);
  const label = yLabel ? { label: yLabel, labelSize: 18, labelGap: 0, labelFont: FONT } : {};
  const forest = isForest ? { x: { ori: 1, dir: -1 }, y: { ori: 0 } } : {};
  const u = new uPlot({
    width: plot.clientWidth, height: isPaper() && !isForest ? 230 : height, padding: [10, 20, 0, isForest ? 4 : 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { ...forest.x, time: false, range: () => range }, y: { ...forest.y, range: () => [Math.min(...ends) - (zone ? 1.6 : 1) * room, Math.max(...ends) + room] } },
    axes: isForest ? [{ ...first, side: 3 }, { ...second, side: 2, size: 30, space: 60, ...label }] : [first, { ...second, ...label }],
    series: [{}, { stroke: "transparent", points: { show: false } }],
    hooks: {
      drawClear: zone ? [(u) => drawZone(u, zone)] : [],
      draw: [(u) => { if (zone && zoneLabel) drawZone(u, zone, zoneLabel); drawIntervals(u, ordered); if (key) key.replaceChildren(...drawNames(u, points, zone).map((point) => h("li", {}, h("span", { class: "chip" }, h("i", { class: "c" + point.color % COLORS }), point.label), h("small", {}, " " + signed(point.y) + ", " + point.note)))); }],
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
  if (key) element.append(key);
  return u;
}

const SIDES = [[9, 0], [-9, 0], [0, -15], [0, 15], [9, -13], [9, 13], [-9, -13], [-9, 13]]; // from a point to its name

/** Writes the name of each point beside it. Returns the points without room for a name: the key below has them. */
function drawNames(u, points, zone) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, half = 7 * ratio;
  const at = (point, value) => [u.valToPos(point.x, "x", true), u.valToPos(value, "y", true)];
  const taken = points.flatMap((point) => {
    const [x, y] = at(point, point.y), [low, high] = (point.interval ?? []).map((value) => at(point, value)[1]);
    return [[x - half, y - half, x + half, y + half], ...(point.interval ? [[x - 4 * ratio, high, x + 4 * ratio, low]] : [])];
  });
  if (zone) taken.push([bbox.left + bbox.width - 90 * ratio, u.valToPos(zone[0], "y", true), bbox.left + bbox.width, Infinity]); // its label
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.fillStyle = style("--ink");
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const left = points.filter((point) => {
    const name = shorten(point.label), width = ctx.measureText(name).width, [x, y] = at(point, point.y);
    for (const [dx, dy] of SIDES) {
      const start = x + dx * ratio - (dx > 0 ? 0 : dx < 0 ? width : width / 2), middle = y + dy * ratio;
      const box = [start, middle - half, start + width, middle + half];
      const isInside = box[0] >= bbox.left && box[1] >= bbox.top && box[2] <= bbox.left + bbox.width && box[3] <= bbox.top + bbox.height;
      if (!isInside || taken.some(([a, b, c, d]) => box[0] < c && a < box[2] && box[1] < d && b < box[3])) continue;
      taken.push(box);
      ctx.fillText(name, start, middle);
      return false;
    }
    return true;
  });
  ctx.restore();
  return left;
}
