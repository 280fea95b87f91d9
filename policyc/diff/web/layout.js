// Level 3 as a graph: the blocks of one scope, laid out by dagre in a worker. Boxes of scopes open on a click.

const MOST_NODES = 150; // a flat layout of more takes seconds and cannot be read
let layoutWorker = null;
let layoutRequest = 0;

/** The boxes of a scope: its scopes, its changed equations, and one box for each run of unchanged equations. */
function boxesOf(number) {
  const boxes = [];
  const add = (id, kind, text, members, target) => boxes.push({ id, kind, text, members, target, width: 22 + 6.3 * Math.min(34, text.length), height: 26 });
  const addScope = (each) => {
    const node = graph.nodes[each];
    add(each, node.changed ? "scope changed" : "scope", `${scopeName(node)} (${node.equations})`, [each], each);
  };
  for (const block of blocksOf(number)) {
    if (block.kind === "scope") addScope(block.number);
    else if (block.kind === "same") {
      const [first] = block.numbers;
      add(first, "both", block.numbers.length > 1 ? `${block.numbers.length} unchanged` : graph.nodes[first].op, block.numbers, null);
    } else {
      for (const side of SIDES) for (const each of block[side]) add(each, side, graph.nodes[each].op, [each], scopesIn(each)[0] ?? null);
    }
  }
  return boxes;
}

/** The edges of equations between the boxes that show them. */
function edgesOf(boxes) {
  const boxOf = new Map(boxes.flatMap((box) => box.members.map((member) => [member, box.id])));
  const lift = (number) => {
    for (let each = number; each !== null && each !== undefined; each = parents[each]) if (boxOf.has(each)) return boxOf.get(each);
    return null;
  };
  const edges = new Map();
  for (const [from, to] of graph.edges) {
    const [a, b] = [lift(from), lift(to)];
    if (a !== null && b !== null && a !== b) edges.set(`${a}.${b}`, [a, b]);
  }
  return [...edges.values()];
}

function drawLayout(number) {
  const all = boxesOf(number);
  const boxes = all.slice(0, MOST_NODES);
  const edges = edgesOf(boxes);
  const box = byId("equations");
  box.replaceChildren(h("p", { class: "quiet" }, "laying out…"));
  layoutWorker ??= new Worker(URL.createObjectURL(new Blob([byId("worker").textContent], { type: "text/javascript" })));
  layoutRequest += 1;
  const request = layoutRequest;
  layoutWorker.onerror = (event) => box.replaceChildren(h("p", { class: "warning" }, `The layout failed: ${event.message}. Use side by side.`));
  layoutWorker.onmessage = (event) => {
    if (request === layoutRequest && state.view === "graph") showLayout(box, boxes, event.data, all.length - boxes.length);
  };
  layoutWorker.postMessage({ nodes: boxes.map(({ id, width, height }) => ({ id, width, height })), edges });
}

function showLayout(container, boxes, layout, left) {
  const places = new Map(layout.nodes.map((node) => [node.id, node]));
  const line = (points) => "M" + points.map((point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join("L");
  const svg = s("svg", { width: layout.width, height: layout.height, viewBox: `0 0 ${layout.width} ${layout.height}`, role: "img", "aria-label": "Graph of equations" },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 6, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" }, s("path", { d: "M0 0L6 3L0 6z" }))),
    layout.edges.map((points) => s("path", { class: "edge", d: line(points), "marker-end": "url(#arrow)" })),
    boxes.map((box) => drawBox(box, places.get(box.id))));
  container.replaceChildren(
    h("p", { class: "quiet" }, "Removed: dashed. Added: bold. Click a scope to open it.", left ? ` ${left} of the boxes are left out: open a smaller scope.` : ""),
    h("div", { class: "graph" }, svg));
}

function drawBox(box, { x, y }) {
  const open = () => setState({ scope: String(box.target) });
  const keys = (event) => { if (event.key === "Enter") open(); };
  const node = graph.nodes[box.id];
  return s("g", { class: `box ${box.kind}`, transform: `translate(${x - box.width / 2} ${y - box.height / 2})`,
    ...(box.target === null ? {} : { tabindex: 0, role: "button", click: open, keydown: keys }) },
  s("title", {}, isScope(node) ? scopePath(box.id) : [node.outputs.join(", "), node.op, node.params, node.place].filter(Boolean).join("\n")),
  s("rect", { width: box.width, height: box.height, rx: 4 }),
  s("text", { x: box.width / 2, y: 17, "text-anchor": "middle" }, shorten(visible(box.text), 34)));
}
