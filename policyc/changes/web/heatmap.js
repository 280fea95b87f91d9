// Level 1: the heat map. A row is a product of a linear, a column is a layer. One path draws all cells of a run with the
// same color, so that thousands of cells are few elements.

const ROW = 13;
const LABEL = 236;
const heat = { rows: [], groups: [], svg: null, width: 0, cursor: null, drag: null };

function drawMap() {
  const width = Math.max(480, byId("map").clientWidth - 2);
  Object.assign(heat, { rows: [], groups: [], width });
  const parts = [];
  let y = 4;
  data.stacks.forEach((stack, number) => { y = drawStack(stack, number, y, parts); });
  heat.brush = s("rect", { class: "brush", visibility: "hidden" });
  heat.focus = s("rect", { class: "focus", visibility: "hidden", rx: 2 });
  heat.svg = s("svg", { viewBox: `0 0 ${width} ${y}`, width, height: y, role: "img", "aria-labelledby": "sentence" },
    s("defs", {}, s("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("path", { d: "M0 0V4", class: "hatch" }))),
    parts, heat.brush, heat.focus);
  byId("map").replaceChildren(heat.svg);
  drawLegend();
  updateMap();
}

function drawStack(stack, number, y, parts) {
  const grid = heat.width - LABEL - 8;
  const column = stack.size ? Math.min(grid / stack.size, 56) : 56;
  if (stack.size) {
    parts.push(s("text", { x: 0, y: y + 10, class: "stack" }, `${stack.name}, ${count(stack.size, "layer")}`));
    parts.push(drawAxis(stack, column, y + 10));
    y += 17;
  }
  for (const index of stack.linears) {
    const linear = data.linears[index];
    const products = GEMMS.filter((product) => linear.runs.some((run) => run.products[product]));
    parts.push(s("text", { x: 0, y: y + 10, class: "name" }, s("title", {}, fullName(linear)), shorten(visible(linear.name), 29)));
    for (const product of products) {
      parts.push(s("text", { x: LABEL - 6, y: y + 10, class: "product", "text-anchor": "end" }, product));
      heat.rows.push({ index, product, stack, number, y, column });
      for (const cell of cells) {
        if (cell.number === index && cell.product === product) parts.push(drawRun(cell, y, column));
      }
      y += ROW;
    }
    y += 5;
  }
  return y + 6;
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

/** All cells of a run: changed ones are split, before on the left. */
function drawRun(cell, y, column) {
  const { color } = heat.scale;
  const gap = column > 3 ? 1 : 0.4;
  const [width, height] = [column - gap, ROW - 2];
  const isSplit = cell.change.changed && !currentOverlay().perLayer;
  const paths = new Map();
  const add = (fill, x, w) => paths.set(fill, (paths.get(fill) ?? "") + `M${x.toFixed(2)} ${y}h${w.toFixed(2)}v${height}h${(-w).toFixed(2)}z`);
  for (let layer = cell.first; layer <= cell.last; layer += 1) {
    const x = LABEL + layer * column;
    if (isSplit) add(color(cell, "before", layer), x, width * 0.36);
    add(color(cell, "after", layer), isSplit ? x + width * 0.36 : x, isSplit ? width * 0.64 : width);
  }
  if (isHatched(cell)) { // last, on top of all colors
    const before = isSplit && !cell.run.opaque ? width * 0.36 : 0; // only what is after is emulated
    for (let layer = cell.first; layer <= cell.last; layer += 1) add("url(#hatch)", LABEL + layer * column + before, width - before);
  }
  const group = s("g", {}, [...paths].map(([fill, d]) => s("path", { d, style: `fill:${fill}` })));
  heat.groups.push([group, cell]);
  return group;
}

function drawLegend() {
  byId("legend").replaceChildren(
    ...heat.scale.entries.map(([color, text]) => h("span", { class: "chip" }, h("i", { style: `background:${color}` }), text)),
    h("span", { class: "chip" }, h("i", { class: "split" }), "split: before | after"),
    h("span", { class: "chip" }, h("i", { class: "hatched" }), "emulated or opaque"));
}

/** Dims what the filters leave out, and marks the brushed layers and the cell whose details are kept. */
function updateMap() {
  const filtered = isFiltered();
  for (const [group, cell] of heat.groups) group.classList.toggle("dim", filtered && !isShown(cell));
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
  watch(["q", "rule", "format", "product", "changed", "brush", "cell"], updateMap);
}
