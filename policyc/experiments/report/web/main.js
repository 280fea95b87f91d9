// Draws all charts, and draws them again when the width, the theme or the medium changes.

function gapChart(element, baseline) {
  const rows = data.comparisons.filter((row) => row.baseline === baseline && row.gap !== null);
  if (!rows.length) return null;
  const points = rows.map((row, n) => ({ x: n, y: row.gap, interval: row.interval, label: row.variant, color: data.colors[row.variant], note: row.verdict }));
  const margin = rows.find((row) => row.margin !== null)?.margin;
  // A variant a row: names stay horizontal, and there is room for any number of them.
  const longest = element.clientWidth < 480 ? 18 : 30;
  let names = rows.map((row) => shorten(row.variant, longest));
  if (!areDistinct(names)) names = rows.map((row, n) => n + 1 + " " + shorten(row.variant, longest - 3));
  return pointChart(element, points, {
    title: "Final gap to " + baseline, note: "nats, with the paired t interval of each variant" + (margin ? "; shaded: margin " + data.margin : ""),
    height: 74 + Math.max(26, 20 * rows.length), range: [-0.6, rows.length - 0.4], zone: margin ? [-margin, margin] : null, isForest: true, yLabel: "nats per token",
    xAxis: { splits: () => names.map((_, n) => n), values: () => names, size: 14 + Math.max(...names.map(textWidth)), gap: 6, grid: { show: false } },
  });
}

function speedUpChart(element) {
  const [baseline] = data.comparisons.map((row) => row.baseline);
  const rows = data.comparisons.filter((row) => row.baseline === baseline && row.gap !== null && row.variant in data.speed_ups.values);
  const points = rows.map((row) => ({ x: data.speed_ups.values[row.variant], y: row.gap, interval: row.interval, label: row.variant, color: data.colors[row.variant], note: data.speed_ups.values[row.variant].toFixed(2) + "× predicted" }));
  points.unshift({ x: 1, y: 0, interval: null, label: baseline, color: data.colors[baseline], note: "baseline" });
  const speeds = points.map((point) => point.x), room = (Math.max(...speeds) - Math.min(...speeds)) * 0.12 || 0.1;
  const margin = rows.find((row) => row.margin !== null)?.margin;
  return pointChart(element, points, {
    title: "Gap against predicted speed-up", note: "bars: paired t intervals; speed-up of " + data.speed_ups.step + ", from the cost model: the larger of its two bounds", height: 330,
    range: [Math.min(...speeds) - room, Math.max(...speeds) + 1.6 * room], zone: margin ? [-margin, margin] : null, zoneLabel: "margin " + data.margin, hasNames: true, yLabel: "gap to " + shorten(baseline) + ", nats per token",
    xAxis: { values: (u, splits) => splits.map((v) => v.toFixed(2) + "×"), label: "predicted speed-up of a step", labelSize: 18, labelFont: FONT, size: 34 },
  });
}

/** The switches above the charts. */
function switches() {
  const choose = (label, options, change) => h("label", {}, label, " ", h("select", { change: (event) => { change(event.currentTarget.value); draw(); } }, options.map(([value, text]) => h("option", { value }, text))));
  const units = xUnits();
  return [
    ...(units.length > 1 ? [choose("over", units.map((unit) => [unit, unit]), (value) => { view.x = value; })] : []),
    choose("smoothing", [["0", "none"], ["2", "5 points"], ["7", "15 points"]], (value) => { view.smooth = Number(value); }),
    choose("scale", [["linear", "linear"], ["log", "logarithmic"]], (value) => { view.isLog = value === "log"; }),
  ];
}

let charts = [];

function draw() {
  for (const u of charts) u.destroy();
  charts = [];
  for (const element of document.querySelectorAll("figure.chart")) {
    if (element.closest("details:not([open])") || !element.clientWidth) continue;
    const { chart, gaps } = element.dataset;
    const u = chart !== undefined ? lineChart(element, data.charts[Number(chart)]) : gaps !== undefined ? gapChart(element, gaps) : speedUpChart(element);
    if (u) charts.push(u);
  }
}

let width = document.body.clientWidth, pending = 0;
document.getElementById("switches")?.append(...switches());
draw();

function redrawSoon() {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => { width = document.body.clientWidth; draw(); });
}

new ResizeObserver(() => { if (document.body.clientWidth !== width) redrawSoon(); }).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawSoon);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => { if (details.querySelector("figure.chart")) redrawSoon(); });

function setPaper(isPaper) {
  document.documentElement.classList.toggle("paper", isPaper);
  draw();
}
addEventListener("beforeprint", () => setPaper(true));
addEventListener("afterprint", () => setPaper(false));
document.documentElement.dataset.ready = "true";
