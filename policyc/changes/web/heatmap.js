// Level 1: the heat map. A row is a product of a linear, a column is a layer. One path draws all cells of a run with the
// same color, so that thousands of cells are few elements.

const ROW = 13;
const LABEL = 236;
const SINGLE = 56; // width of the cell of a linear outside of stacks
const LEAST_WITH_GAP = 8; // narrower cells have no gap between them, which would be as visible as they are
const heat = { rows: [], svg: null, width: 0, cursor: null, drag: null };

function drawMap() {
  const width = Math.max(480, byId("map").clientWidth - 2);
  Object.assign(heat, { rows: [], width });
  const parts = [];
  let y = 4;
  data.stacks.forEach((stack, number) => { y = drawStack(stack, number, y, parts); });
  if (!heat.rows.length) parts.push(s("text", { x: 0, y: y + 10 }, "No product matches the filters."));
  heat.brush = s("rect", { class: "brush", visibility: "hidden" });
  heat.focus = s("rect", { class: "focus", visibility: "hidden", rx: 2 });
  heat.svg = s("svg", { viewBox: `0 0 ${width} ${Math.max(y, 20)}`, width, height: Math.max(y, 20), role: "img", "aria-labelledby": "sentence" },
    s("defs", {}, s("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("path", { d: "M0 0V4", class: "hatch" }))),
    parts, heat.brush, heat.focus);
  byId("map").replaceChildren(heat.svg);
  drawLegend();
  updateMap();
}

/** A stack of layers: its linears that the filters leave. Returns the y after it. */
function drawStack(stack, number, y, parts) {
  const own = stack.linears.map((index) => [index, cells.filter((cell) => cell.number === index)]).filter(([, each]) => each.some(isShown));
  if (!own.length) return y;
  const grid = heat.width - LABEL - 8;
  const column = stack.size ? grid / stack.size : SINGLE;
  if (stack.size) {
    parts.push(s("text", { x: 0, y: y + 10, class: "stack" }, `${stack.name}, ${count(stack.size, "layer")}`));
    parts.push(drawAxis(stack, column, y + 10));
    y += 20;
  }
  for (const [index, members] of own) {
    const linear = data.linears[index];
    const products = GEMMS.filter((product) => members.some((cell) => cell.product === product && isShown(cell)));
    parts.push(s("text", { x: 0, y: y + 10, class: "name" }, s("title", {}, fullName(linear)), shorten(visible(linear.name), 29)));
    if (products.length > 1) parts.push(s("text", { x: 0, y: y + 10 + ROW, class: "axis" }, describeLinear(linear)));
    for (const product of products) {
      parts.push(s("text", { x: LABEL - 6, y: y + 10, class: "product", "text-anchor": "end" }, s("title", {}, explain(product)), product));
      heat.rows.push({ index, product, stack, number, y, column });
      parts.push(...members.filter((cell) => cell.product === product).map((cell) => drawRun(cell, y, column)));
      y += ROW;
    }
    y += 5;
  }
  return y + 6;
}

/** The kind of a linear, where its name does not say it, and its shape. */
function describeLinear(linear) {
  const [run] = linear.runs;
  const kind = run.kind && !linear.name.includes(run.kind) ? `${run.kind}, ` : "";
  return `${kind}${run.batch > 1 ? `${run.batch} × ` : ""}${run.m} × ${run.n} × ${run.k}`;
}

const shorten = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);

/** The first layers of the classes, and the last layer. */
function drawAxis(stack, column, y) {
  const starts = stack.classes.flatMap((each) => each.layers.map((range) => range[0]));
  const step = Math.max(1, Math.ceil(26 / column));
  const rounds = [1, 2, 4, 8, 10, 16, 20, 32, 64, 100].find((each) => each >= step) ?? step;
  const even = Array.from({ length: Math.ceil(stack.size / rounds) }, (_, index) => index * rounds);
  const numbers = [];
  for (const number of [...new Set([0, ...starts, stack.size - 1, ...even])]) {
    if (numbers.every((other) => Math.abs(other - number) * column >= 22)) numbers.push(number);
  }
  return numbers.map((number) => s("text", { x: LABEL + (number + 0.5) * column, y, class: "axis", "text-anchor": "middle" }, number));
}

/** All cells of a run, in the color of what is after. What is before is the top of a changed cell; others are lines. */
function drawRun(cell, y, column) {
  const { color } = heat.scale;
  const width = column - (column >= LEAST_WITH_GAP ? 1 : 0);
  const isLine = !cell.change.changed && currentOverlay().kind === "format";
  const hasBefore = cell.change.changed && !currentOverlay().perLayer;
  const [bodies, hatches, befores] = [new Map(), new Map(), new Map()];
  const add = (paths, fill, layer, top, height) => {
    const box = `M${(LABEL + layer * column).toFixed(2)} ${y + top}h${width.toFixed(2)}v${height}h${(-width).toFixed(2)}z`;
    paths.set(fill, (paths.get(fill) ?? "") + box);
  };
  for (let layer = cell.first; layer <= cell.last; layer += 1) {
    const [top, height] = isLine ? [4, 3] : [0, ROW - 2];
    add(bodies, color(cell, "after", layer), layer, top, height);
    if (isHatched(cell) && !isLine) add(hatches, "url(#hatch)", layer, top, height);
    if (hasBefore) add(befores, color(cell, "before", layer), layer, 0, 3);
  }
  const group = s("g", {}, [bodies, hatches, befores].flatMap((paths) => [...paths].map(([fill, d]) => s("path", { d, style: `fill:${fill}`, class: paths === befores ? "before" : null }))));
  if (isFiltered() && !isShown(cell)) group.classList.add("dim");
  return group;
}

function drawLegend() {
  byId("legend").replaceChildren(...[
    ...heat.scale.entries.map(([color, text]) => h("span", { class: "chip" }, h("i", { style: `background:${color}` }), text)),
    h("span", { class: "chip" }, h("i", { class: "cut" }), "top: before"),
    currentOverlay().kind === "format" ? h("span", { class: "chip" }, h("i", { class: "line" }), "line: unchanged") : null,
    cells.some(isHatched) ? h("span", { class: "chip", title: `${explain("emulated")}; ${explain("opaque")}` }, h("i", { class: "hatched" }), "emulated or opaque") : null].filter(Boolean));
}

/** Marks the brushed layers and the cell whose details are kept. */
function updateMap() {
  const brush = readBrush();
  const rows = brush ? heat.rows.filter((row) => row.number === brush.number) : [];
  place(heat.brush, rows.length ? {
    x: LABEL + brush.first * rows[0].column, y: rows[0].y - 3,
    width: (brush.last - brush.first + 1) * rows[0].column, height: rows.at(-1).y - rows[0].y + ROW + 4,
  } : null);
  const kept = readCell();
  const row = kept && heat.rows.find((each) => each.index === kept.cell.number && each.product === kept.cell.product);
  place(heat.focus, row ? { x: LABEL + kept.layer * row.column - 1.5, y: row.y - 1.5, width: row.column + 2, height: ROW + 1 } : null);
  byId("details").replaceChildren(...(kept ? [h("div", { class: "card" }, describeCell(kept.cell, kept.layer, true))] : []));
}

function place(rect, box) {
  rect.setAttribute("visibility", box ? "visible" : "hidden");
  for (const [name, value] of Object.entries(box ?? {})) rect.setAttribute(name, value);
}

/** The cell whose details are kept. */
function readCell() {
  const [number, product, layer] = state.cell.split(".");
  const cell = state.cell ? cellAt(Number(number), product, Number(layer)) : undefined;
  return cell ? { cell, layer: Number(layer) } : null;
}

function readBrush() {
  const [number, first, last] = state.brush.split(".").map(Number);
  return state.brush && data.stacks[number] ? { number, first, last } : null;
}

// ---- pointer and keys

/** The nearest row and its layer under the pointer, and the cell if the pointer is inside one. */
function hit(event) {
  const box = heat.svg.getBoundingClientRect();
  const scale = heat.width / box.width;
  const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  const distance = (each) => Math.abs(y - each.y - ROW / 2);
  const row = heat.rows.reduce((best, each) => (best && distance(best) <= distance(each) ? best : each), null);
  const layer = row ? Math.floor((x - LABEL) / row.column) : -1;
  const isColumn = row !== null && layer >= 0 && layer < Math.max(1, row.stack.size);
  const cell = isColumn && distance(row) <= ROW / 2 ? cellAt(row.index, row.product, layer) : undefined;
  return { row, layer, cell, isColumn };
}

function showTip(event, cell, layer) {
  const tip = byId("tip");
  tip.replaceChildren(...describeCell(cell, layer, false).flat(Infinity).filter(Boolean));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  const below = event.clientY + 18;
  tip.style.top = Math.max(4, below + height > innerHeight ? event.clientY - height - 12 : below) + "px";
}

function hideTip() {
  byId("tip").hidden = true;
  lightRules();
}

function pointAt(event) {
  const { row, layer, cell, isColumn } = hit(event);
  if (heat.drag && isColumn && row.number === heat.drag.number) {
    heat.drag.moved ||= layer !== heat.drag.layer;
    if (heat.drag.moved) {
      setState({ brush: [row.number, Math.min(layer, heat.drag.layer), Math.max(layer, heat.drag.layer)].join(".") });
    }
  }
  if (!cell) return hideTip();
  showTip(event, cell, layer);
  return lightRules(keysOf(cell));
}

function keepCell(cell, layer) {
  const number = data.stacks.findIndex((stack) => stack.linears.includes(cell.number));
  const index = data.stacks[number].classes.findIndex((each) => each.layers.some(([a, b]) => a <= layer && layer <= b));
  setState({ cell: [cell.number, cell.product, layer].join("."), cls: `${number}.${Math.max(0, index)}` });
}

function moveCursor(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (event.key === "Escape") return setState({ cell: "", brush: "" });
  const step = steps[event.key];
  if (!step || !heat.rows.length) return undefined;
  event.preventDefault();
  const kept = readCell();
  const position = kept ? heat.rows.findIndex((row) => row.index === kept.cell.number && row.product === kept.cell.product) : -1;
  const row = heat.rows[Math.max(0, Math.min(heat.rows.length - 1, kept ? position + step[0] : 0))];
  const last = Math.max(0, row.stack.size - 1);
  const layer = Math.max(0, Math.min(last, kept ? kept.layer + step[1] : 0));
  if (event.shiftKey && step[1]) {
    const brush = readBrush();
    const [first, end] = brush && brush.number === row.number ? [brush.first, brush.last] : [kept ? kept.layer : 0, kept ? kept.layer : 0];
    setState({ brush: [row.number, Math.min(first, layer), Math.max(end, layer)].join(".") });
  }
  const cell = cellAt(row.index, row.product, layer);
  return cell ? keepCell(cell, layer) : undefined;
}

function startMap() {
  const map = byId("map");
  const redraw = () => { heat.scale = overlayScale(); drawMap(); };
  redraw();
  map.addEventListener("pointermove", pointAt);
  map.addEventListener("pointerleave", hideTip);
  map.addEventListener("pointerdown", (event) => {
    const { row, layer, isColumn } = hit(event);
    heat.drag = isColumn ? { number: row.number, layer, moved: false } : null;
  });
  addEventListener("pointerup", (event) => {
    const { drag } = heat;
    heat.drag = null;
    if (!drag || drag.moved) return;
    const { cell, layer } = hit(event);
    if (cell) keepCell(cell, layer);
  });
  map.addEventListener("dblclick", () => setState({ brush: "", cell: "" }));
  map.addEventListener("keydown", moveCursor);
  addEventListener("resize", drawMap);
  watch(["overlay"], redraw);
  watch(FILTERS, drawMap);
  watch(["brush", "cell"], updateMap);
}
