// Level 3: the equations of one scope, before and after side by side. Matched pairs share a row, unchanged runs are folded.

const FOLD = 3; // runs of fewer unchanged equations are shown
const MOST_OPEN = 120; // more rows than a reader follows at once
const { graph } = data;
const parents = new Array(graph.nodes.length).fill(null);
graph.nodes.forEach((node, number) => { for (const child of node.children ?? []) parents[child] = number; });

const isScope = (node) => node.type === "scope";
const ranges = (list) => list.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");

function scopeName(node) {
  const layers = node.members ? `[${ranges(node.members)}]` : "";
  const pieces = node.iterations ? ` iterations ${ranges([node.iterations])}` : "";
  const isBody = !["scope", "layers", "hoisted", "loss"].includes(node.kind); // what a container runs
  const name = isBody ? [node.kind, /^(call_)?jaxpr$/.test(node.name) ? null : node.name].filter(Boolean).join(" ") : node.name || node.kind;
  return `${name}${layers}${pieces}`;
}

function ancestors(number) {
  const path = [];
  for (let each = number; each !== null && each !== undefined; each = parents[each]) path.unshift(each);
  return path;
}

const scopePath = (number) => ancestors(number).slice(1).map((each) => scopeName(graph.nodes[each])).join("/");

// ---- what is open

const openScopes = () => new Set(state.open ? state.open.split(".").map(Number) : []);

/** A search opens the scopes around what it finds, as long as a reader can follow; a click closes them again. */
const isFound = (number) => Boolean(state.q) && shownNodes.get(0) <= MOST_OPEN && isScope(graph.nodes[parents[number] ?? 0]) && !isSearched([scopeName(graph.nodes[number])]);
const isScopeOpen = (number) => openScopes().has(number) !== isFound(number);
const openScope = (open, number) => (isFound(number) ? open.delete(number) : open.add(number));

function toggleScope(number) {
  const open = openScopes();
  if (!open.delete(number)) open.add(number);
  setState({ open: [...open].join(".") });
}

// ---- filters

let shownNodes = new Map(); // the scopes and equations that the filters leave, with the number of equations in each

/** Do the filters leave an equation? `isNamed`: the name of a scope around it has the searched text. */
function isEquationShown(node, isNamed) {
  if (state.changed && node.side === "both") return false;
  const linears = [node.linear, ...(node.readers ?? [])].filter((each) => each !== undefined);
  const own = linears.flatMap((linear) => GEMMS.map((product) => cellAt(linear, product, node.layer ?? 0))).filter(Boolean);
  const selected = own.filter(isSelected);
  if ((state.rule || state.format || state.product) && !selected.length) return false;
  return isNamed || isSearched([node.op, node.place, ...selected.flatMap(searchTexts)]);
}

/** Fills `shownNodes`. What is inside a shown equation is shown with it. */
function filterNodes() {
  shownNodes = new Map();
  const visit = (number, isNamed, isInside) => {
    const node = graph.nodes[number];
    const isOwn = !isScope(node) && (isInside || isEquationShown(node, isNamed));
    const named = isNamed || (isScope(node) && number > 0 && Boolean(state.q) && isSearched([scopeName(node)]));
    const total = (node.children ?? []).reduce((sum, child) => sum + visit(child, named, isOwn || isInside), Number(isOwn));
    if (total) shownNodes.set(number, total);
    return total;
  };
  if (graph.nodes.length) visit(0, false, false);
}

// ---- rows

/** The scopes in a scope, and those in its equations: what a container runs. */
function scopesIn(number) {
  return (graph.nodes[number].children ?? []).flatMap((child) => (isScope(graph.nodes[child]) ? [child] : scopesIn(child)));
}

/** The children of a scope that the filters leave, as blocks: scopes, runs of unchanged equations, and groups with the same pair. */
function blocksOf(number) {
  const blocks = [];
  for (const child of (graph.nodes[number].children ?? []).filter((each) => shownNodes.has(each))) {
    const node = graph.nodes[child];
    const last = blocks.at(-1);
    const inner = isScope(node) ? [] : scopesIn(child).filter((each) => shownNodes.has(each));
    if (isScope(node)) blocks.push({ kind: "scope", number: child });
    else if (node.side === "both") {
      if (last?.kind === "same" && !last.inner.length) last.numbers.push(child);
      else blocks.push({ kind: "same", numbers: [child], inner: [] });
      blocks.at(-1).inner.push(...inner);
    } else {
      if (last?.kind !== "pair" || last.pair !== node.pair) {
        blocks.push({ kind: "pair", pair: node.pair, before: [], after: [], inner: [] });
      }
      blocks.at(-1)[node.side].push(child);
      blocks.at(-1).inner.push(...inner);
    }
  }
  return blocks;
}

function equationText(node) {
  return [h("span", { class: "out" }, node.outputs.join(", ")), " = ", h("b", {}, node.op), " ",
    (node.inputs ?? []).join(" "), node.params ? h("span", { class: "params" }, " " + node.params) : null];
}

// ---- products: equations that give the result of one

const resultNodes = new Set(); // the last equation of each side of a site

function findResults() {
  for (const { children } of graph.nodes) {
    const seen = new Set();
    for (const child of [...children ?? []].reverse()) {
      const node = graph.nodes[child];
      const key = `${node.pair}.${node.side}`;
      if (isScope(node) || node.linear === undefined || seen.has(key)) continue;
      seen.add(key);
      if (node.reason === undefined || node.reason === "replaced") resultNodes.add(child);
    }
  }
}

/** The product that an equation gives, with the value of the current overlay; null if it gives none. */
function figureOf(number) {
  const node = graph.nodes[number];
  const cell = resultNodes.has(number) ? cellAt(node.linear, "fprop", node.layer ?? 0) : undefined;
  if (!cell) return quantizationFigure(node);
  const side = node.side === "both" ? "after" : node.side;
  const run = stateOf(cell.change[side]);
  const value = measure(cell, node.layer ?? 0, side);
  const overlay = currentOverlay();
  const text = [overlay.kind === "format" ? run.format : null, value].filter((each) => each !== null).join(" · ");
  return { cell, layer: node.layer ?? 0, text: `fprop ${text || "not measured"}`, color: heat.scale.color(cell, side, node.layer ?? 0) };
}

/** The measured error of a quantization, where the overlay asks for it. */
function quantizationFigure(node) {
  if (state.overlay !== "sqnr" || node.linear === undefined) return null;
  const operands = quantizedOperands(node);
  const entries = stats.operands.filter((each) => each.linear === node.linear && operands.includes(each.operand)
    && isLayer(each, node.layer ?? 0) && typeof each.sqnr_db === "number");
  return entries.length ? { text: entries.map((each) => `${each.operand} ${each.sqnr_db.toFixed(1)} dB`).join(", ") } : null;
}

let figures = []; // elements of products, with their cells

/** Marks the equations of the cell whose details are kept. */
function markCurrent() {
  const kept = readCell()?.cell;
  for (const [element, cell] of figures) element.classList.toggle("current", cell === kept);
}

function figureButton(number) {
  const figure = figureOf(number);
  if (!figure) return null;
  if (!figure.cell) return h("span", { class: "figure" }, figure.text);
  const button = h("button", { type: "button", class: "figure", title: "Show this product in the heat map", click: () => keepCell(figure.cell, figure.layer) },
    h("i", { style: `background:${figure.color}` }), figure.text);
  figures.push([button, figure.cell]);
  return button;
}

/** Opens the equations of a product of a layer. */
function showEquations(cell) {
  const numbers = [...resultNodes].filter((number) => figureOf(number)?.cell === cell);
  const open = openScopes();
  for (const number of numbers) for (const each of ancestors(number).slice(1, -1)) openScope(open, each);
  setState({ open: [...open].join("."), scope: "0", view: "list" });
  (document.querySelector("#equations .figure.current") ?? byId("level3")).scrollIntoView({ block: "center" });
}

/** The changed products of a site whose product here stays: `dgrad, wgrad: f32 → bf16`. */
function gradientChanges(node) {
  const changed = GEMMS.map((product) => cellAt(node.linear, product, node.layer ?? 0)).filter((cell) => cell?.change.changed);
  return `${changed.map((cell) => cell.product).join(", ")}: ${[...new Set(changed.map(formatChange))].join(", ")}`;
}

/** Is it only replaced because of others: a container with changes inside, or a product that stays while its gradients change? */
function isNeutral(node) {
  if (node.reason !== "replaced" || node.linear === undefined) return node.reason === "entered";
  return cellAt(node.linear, "fprop", node.layer ?? 0)?.change.changed === false;
}

function equationCell(number, mark) {
  if (number === undefined) return h("div", { class: "equation none" });
  const node = graph.nodes[number];
  const linear = node.linear === undefined ? null : data.linears[node.linear];
  const facts = [node.reason, linear ? linear.name : null,
    node.readers ? `read by ${node.readers.map((reader) => data.linears[reader].name).join(", ")}` : null].filter(Boolean);
  const isQuiet = isNeutral(node);
  if (isQuiet) facts.unshift(node.reason === "entered" ? "changes inside" : gradientChanges(node));
  return h("div", { class: `equation ${isQuiet ? "neutral" : node.side}`, title: visible([node.place, ...facts].filter(Boolean).join("\n")) },
    h("span", { class: "mark", "aria-hidden": "true" }, mark), h("code", {}, equationText(node)),
    facts.length && node.side !== "both" ? h("span", { class: "reason" }, facts.join(" · ")) : null,
    figureButton(number));
}

function rowsOf(number) {
  return blocksOf(number).flatMap((block) => {
    if (block.kind === "scope") return [drawScope(block.number)];
    const inner = block.inner.map(drawScope);
    if (block.kind === "same") return [...sameRows(block.numbers), ...inner];
    const length = Math.max(block.before.length, block.after.length);
    // The last equation of a group gives the result on both sides: groups are aligned at their ends.
    const at = (list, index) => list[index - (length - list.length)];
    const rows = Array.from({ length }, (_, index) => h("div", { class: "row pair" },
      equationCell(at(block.before, index), "−"), equationCell(at(block.after, index), "+")));
    return [...rows, ...inner];
  });
}

function sameRows(numbers) {
  const rows = () => numbers.map((number) => h("div", { class: "row same" }, equationCell(number, " ")));
  if (numbers.length < FOLD) return rows();
  const isOpen = openScopes().has(numbers[0]);
  const button = h("button", { type: "button", class: "fold", "aria-expanded": String(isOpen), click: () => toggleScope(numbers[0]) },
    h("span", { class: "arrow", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), ` ${numbers.length} unchanged equations`);
  return [button, ...(isOpen ? rows() : [])];
}

function describeScope(number) {
  const { changed, equations } = graph.nodes[number];
  if (isFiltered()) return `${shownNodes.get(number)} of ${count(equations, "equation")} kept by the filters`;
  return changed ? `${changed} of ${count(equations, "equation")} on one side only` : count(equations, "unchanged equation");
}

function drawScope(number) {
  const node = graph.nodes[number];
  const isOpen = isScopeOpen(number);
  const changes = describeScope(number);
  return h("div", { class: "scope" + (node.changed ? " changed" : "") },
    h("div", { class: "scope-head" },
      h("button", { type: "button", class: "opener", "aria-expanded": String(isOpen), click: () => toggleScope(number) },
        h("span", { class: "arrow", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), " ", h("b", {}, scopeName(node)),
        h("span", { class: "quiet" }, "  " + changes)),
      h("button", { type: "button", class: "copy", click: () => setState({ scope: String(number) }) }, "only this"),
      copyButton(scopePath(number), "copy path")),
    isOpen ? h("div", { class: "scope-body" }, rowsOf(number)) : null);
}

// ---- the level

/** The scope that is shown: its number, or the end of its path ("#scope=mlp": the first one with changes). */
function currentScope() {
  const number = /^\d+$/.test(state.scope) ? Number(state.scope)
    : graph.nodes.findIndex((node, each) => isScope(node) && node.changed && scopePath(each).endsWith(state.scope));
  return graph.nodes[number] && isScope(graph.nodes[number]) ? number : 0;
}

function drawEquations() {
  const box = byId("equations");
  if (!graph.nodes.length) {
    box.replaceChildren(h("p", { class: "quiet" }, "The equations of a side are not known."));
    return;
  }
  const number = currentScope();
  const path = ancestors(number);
  byId("crumbs").replaceChildren(
    h("nav", { "aria-label": "Scope" }, path.map((each, index) => [index ? " / " : null,
      h("button", { type: "button", class: "crumb", "aria-current": each === number ? "true" : null, click: () => setState({ scope: String(each) }) }, scopeName(graph.nodes[each]))])),
    h("span", { class: "buttons" },
      h("button", { type: "button", "aria-pressed": String(state.view === "list"), click: () => setState({ view: "list" }) }, "side by side"),
      h("button", { type: "button", "aria-pressed": String(state.view === "graph"), click: () => setState({ view: "graph" }) }, "graph"),
      h("button", { type: "button", click: () => openChanged(number) }, "open changes"),
      h("button", { type: "button", click: () => setState({ open: "" }) }, "close all")));
  figures = [];
  if (state.view === "graph") { drawLayout(number); return; }
  const rows = rowsOf(number);
  box.replaceChildren(sideHeads(), ...(rows.length ? rows : [h("p", { class: "quiet" }, "No equation matches the filters.")]));
  markCurrent();
}

const sideHeads = () => h("div", { class: "row head" }, SIDES.map((side) => h("div", {}, side, " ", h("small", {}, data[side].label))));

/** Opens the scopes with changes below a scope, in order, at most `MOST_OPEN`. */
function openChanged(number) {
  const open = openScopes();
  const visit = (each) => {
    for (const scope of scopesIn(each).filter((inner) => graph.nodes[inner].changed && shownNodes.has(inner))) {
      if (open.size >= MOST_OPEN) return;
      openScope(open, scope);
      visit(scope);
    }
  };
  visit(number);
  setState({ open: [...open].join(".") });
}

function startEquations() {
  findResults();
  filterNodes();
  drawEquations();
  watch(FILTERS, filterNodes);
  watch(["scope", "open", "view", "overlay", ...FILTERS], drawEquations);
  watch(["cell"], markCurrent);
}
