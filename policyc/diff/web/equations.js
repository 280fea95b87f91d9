// Level 3: the equations of one scope, before and after side by side. Matched pairs share a row, unchanged runs are folded.

const FOLD = 3; // runs of fewer unchanged equations are shown
const { graph } = data;
const parents = new Array(graph.nodes.length).fill(null);
graph.nodes.forEach((node, number) => { for (const child of node.children ?? []) parents[child] = number; });

const isScope = (node) => node.type === "scope";
const ranges = (list) => list.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");

function scopeName(node) {
  const layers = node.members ? `[${ranges(node.members)}]` : "";
  const pieces = node.iterations ? ` iterations ${ranges([node.iterations])}` : "";
  return `${node.name || node.kind}${layers}${pieces}`;
}

function ancestors(number) {
  const path = [];
  for (let each = number; each !== null && each !== undefined; each = parents[each]) path.unshift(each);
  return path;
}

const scopePath = (number) => ancestors(number).slice(1).map((each) => scopeName(graph.nodes[each])).join("/");

// ---- what is open

const openScopes = () => new Set(state.open ? state.open.split(".").map(Number) : []);

function toggleScope(number) {
  const open = openScopes();
  if (!open.delete(number)) open.add(number);
  setState({ open: [...open].join(".") });
}

// ---- rows

/** The scopes in a scope, and those in its equations: what a container runs. */
function scopesIn(number) {
  return (graph.nodes[number].children ?? []).flatMap((child) => (isScope(graph.nodes[child]) ? [child] : scopesIn(child)));
}

/** The children of a scope as blocks: scopes, runs of unchanged equations, and groups with the same pair. */
function blocksOf(number) {
  const blocks = [];
  for (const child of graph.nodes[number].children ?? []) {
    const node = graph.nodes[child];
    const last = blocks.at(-1);
    const inner = isScope(node) ? [] : scopesIn(child);
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

function equationCell(number, mark) {
  if (number === undefined) return h("div", { class: "equation none" });
  const node = graph.nodes[number];
  const linear = node.linear === undefined ? null : data.linears[node.linear];
  const facts = [node.reason, linear ? linear.name : null, node.product,
    node.readers ? `read by ${node.readers.map((reader) => data.linears[reader].name).join(", ")}` : null].filter(Boolean);
  return h("div", { class: `equation ${node.side}`, title: visible([node.place, ...facts].filter(Boolean).join("\n")) },
    h("span", { class: "mark", "aria-hidden": "true" }, mark), h("code", {}, equationText(node)),
    facts.length && node.side !== "both" ? h("span", { class: "reason" }, facts.join(" · ")) : null);
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
  const rows = () => numbers.map((number) => h("div", { class: "row same" }, equationCell(number, " "), equationCell(number, " ")));
  if (numbers.length < FOLD) return rows();
  const button = h("button", { type: "button", class: "fold", "aria-expanded": "false", click: () => box.replaceChildren(...rows()) },
    `${numbers.length} unchanged equations`);
  const box = h("div", { class: "folded" }, button);
  return [box];
}

function drawScope(number) {
  const node = graph.nodes[number];
  const isOpen = openScopes().has(number);
  const changes = node.changed ? `${node.changed} of ${count(node.equations, "equation")} on one side only` : `${count(node.equations, "unchanged equation")}`;
  return h("div", { class: "scope" + (node.changed ? " changed" : "") },
    h("div", { class: "scope-head" },
      h("button", { type: "button", class: "opener", "aria-expanded": String(isOpen), click: () => toggleScope(number) },
        h("span", { class: "arrow", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), " ", h("b", {}, scopeName(node)),
        node.kind === "scope" || node.kind === node.name ? null : h("small", {}, " " + node.kind), h("span", { class: "quiet" }, "  " + changes)),
      h("button", { type: "button", class: "copy", click: () => setState({ scope: String(number) }) }, "only this"),
      copyButton(scopePath(number), "copy path")),
    isOpen ? h("div", { class: "scope-body" }, rowsOf(number)) : null);
}

// ---- the level

function currentScope() {
  const number = Number(state.scope);
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
  if (state.view === "graph") { drawLayout(number); return; }
  box.replaceChildren(h("div", { class: "row head" }, SIDES.map((side) => h("div", {}, side, " ", h("small", {}, data[side].label)))), ...rowsOf(number));
}

const MOST_OPEN = 120; // more rows than a reader follows at once

/** Opens the scopes with changes below a scope, in order, at most `MOST_OPEN`. */
function openChanged(number) {
  const open = openScopes();
  const visit = (each) => {
    for (const scope of scopesIn(each).filter((inner) => graph.nodes[inner].changed)) {
      if (open.size >= MOST_OPEN) return;
      open.add(scope);
      visit(scope);
    }
  };
  visit(number);
  setState({ open: [...open].join(".") });
}

function startEquations() {
  drawEquations();
  watch(["scope", "open", "view"], drawEquations);
}
