// Level 3 as two graphs, before and after. Both have one layout, made by dagre in a worker, so that equations in the place of
// others stand beside them. Boxes of scopes and of folded runs open on a click.

const MOST_BOXES = 150; // a flat layout of more takes seconds and cannot be read
const BOX = { height: 36, gap: 9, letter: 6.7, most: 38 };
const SMALLEST = 0.7; // the smallest scale at which the texts can be read
let layoutWorker = null;
let layoutRequest = 0;

/** The blocks of a scope with the boxes that each side shows of them. */
function groupsOf(number) {
  const groups = [];
  const blocks = blocksOf(number);
  const bodies = bodiesOf(blocks);
  for (const block of blocks) {
    if (block.kind === "scope") {
      if (!bodies.isBody.has(block.number)) groups.push(scopeGroup(block.number));
    } else if (block.kind === "same" && !openScopes().has(block.numbers[0]) && block.numbers.length > 1) groups.push(runGroup(block.numbers));
    else if (block.kind === "same") groups.push(...block.numbers.map((each) => makeGroup([each], [equationBox(each, bodies)], [equationBox(each, bodies)])));
    else {
      const boxes = SIDES.map((side) => stackBoxes(block[side].map((each) => equationBox(each, bodies))));
      groups.push(makeGroup([...block.before, ...block.after], boxes[0], boxes[1]));
    }
  }
  return groups;
}

/** The scopes that a container runs are opened through the box of its equation, where it is known which. */
function bodiesOf(blocks) {
  const bodies = new Map();
  for (const { number } of blocks.filter((each) => each.kind === "scope" && graph.nodes[each.number].containers)) {
    const key = graph.nodes[number].containers.join();
    bodies.set(key, [...(bodies.get(key) ?? []), number]);
  }
  const found = { isBody: new Map(), of: new Map() };
  for (const [key, scopes] of bodies) {
    const containers = key.split(",").map(Number).filter((each) => graph.nodes[each].inside);
    for (const side of SIDES) {
      const own = containers.filter((each) => graph.nodes[each].side === side);
      if (own.length !== 1 && own.length !== scopes.length) continue;
      own.forEach((each, index) => found.of.set(each, scopes[index]));
      if (own.length === scopes.length) scopes.forEach((scope, index) => found.isBody.set(scope, own[index]));
    }
  }
  return found;
}

const edgeKeys = new Set(graph.edges.map(([from, to]) => `${from}.${to}`));
const readsResult = (reader, producer) => edgeKeys.has(`${producer}.${reader}`);

function makeGroup(members, before, after) {
  const width = (boxes) => Math.max(0, ...boxes.map((box) => 24 + BOX.letter * Math.min(BOX.most, Math.max(box.text.length + (box.open ? 2 : 0), box.small.length * 0.92))));
  const height = (boxes) => boxes.length * (BOX.height + BOX.gap) - BOX.gap;
  return { id: members[0], members, before, after, width: Math.max(width(before), width(after)), height: Math.max(height(before), height(after)) };
}

function scopeGroup(number) {
  const node = graph.nodes[number];
  const box = { number, kind: node.changed ? "scope changed" : "scope", text: scopeName(node), small: describeScope(number), title: scopePath(number), open: () => setState({ scope: String(number) }) };
  const sides = sidesIn(number);
  return makeGroup([number], sides.has("before") ? [box] : [], sides.has("after") ? [box] : []);
}

/** The sides on which a scope has equations. */
function sidesIn(number) {
  const node = graph.nodes[number];
  if (!isScope(node)) return new Set(node.side === "both" ? SIDES : [node.side]);
  return new Set((node.children ?? []).flatMap((child) => [...sidesIn(child)]));
}

function runGroup(numbers) {
  const names = [...new Set(numbers.map((each) => graph.nodes[each].op))].join(", ");
  const box = { number: numbers[0], kind: "run", text: `${numbers.length} unchanged equations`, small: names, title: names, open: () => toggleScope(numbers[0]) };
  return makeGroup(numbers, [box], [box]);
}

function equationBox(number, bodies) {
  const node = graph.nodes[number];
  const body = bodies.of.get(number) ?? scopesIn(number)[0] ?? null;
  const figure = figureOf(number);
  const types = node.outputs.map((output) => output.split(":").slice(1).join(":")).join(", ");
  const name = figure?.cell ? data.linears[node.linear].short_name + ": " : "";
  return { number, kind: isNeutral(node) ? "neutral" : node.side, text: name + node.op, small: figure ? figure.text : types, color: figure?.color, cell: figure?.cell, body,
    title: [node.outputs.join(", "), node.op, node.params, node.place].filter(Boolean).join("\n"),
    open: body === null ? null : () => setState({ scope: String(body) }) };
}

/** Boxes with those in a row that have the same operation as one: a split scan slices each of its inputs. */
function stackBoxes(boxes) {
  const stacked = [];
  for (const box of boxes) {
    const last = stacked.at(-1);
    const isAlike = last && last.text === box.text && !box.open && !box.cell && !last.open && !last.cell;
    if (isAlike) stacked[stacked.length - 1] = { ...last, count: last.count + 1, title: `${last.title}\n\n${box.title}`, small: `${last.small}, ${box.small}` };
    else stacked.push({ ...box, count: 1 });
  }
  return stacked;
}

/** The edges of equations between the groups that show them, with the sides on which they exist. */
function edgesOf(groups) {
  const groupOf = new Map(groups.flatMap((group) => group.members.map((member) => [member, group.id])));
  for (const { number } of blocksOf(currentScope()).filter((each) => each.kind === "scope")) {
    const [container] = graph.nodes[number].containers ?? [];
    if (!groupOf.has(number) && groupOf.has(container)) groupOf.set(number, groupOf.get(container));
  }
  const lift = (number) => {
    for (let each = number; each !== null && each !== undefined; each = parents[each]) if (groupOf.has(each)) return groupOf.get(each);
    return null;
  };
  const edges = new Map();
  for (const [from, to] of graph.edges) {
    const [a, b] = [lift(from), lift(to)];
    if (a === null || b === null || a === b) continue;
    const sides = SIDES.filter((side) => [from, to].every((each) => ["both", side].includes(graph.nodes[each].side)));
    const edge = edges.get(`${a}.${b}`) ?? { from: a, to: b, sides: new Set() };
    for (const side of sides) edge.sides.add(side);
    edges.set(`${a}.${b}`, edge);
  }
  return [...edges.values()];
}

function drawLayout(number) {
  const all = groupsOf(number);
  const boxCount = (group) => Math.max(group.before.length, group.after.length);
  let left = MOST_BOXES;
  const groups = all.filter((group) => { left -= boxCount(group); return left >= 0; });
  const edges = edgesOf(groups);
  const container = byId("equations");
  if (!container.querySelector(".graph")) container.replaceChildren(h("p", { class: "quiet" }, "laying out…"));
  layoutWorker ??= new Worker(URL.createObjectURL(new Blob([byId("worker").textContent], { type: "text/javascript" })));
  layoutRequest += 1;
  const request = layoutRequest;
  layoutWorker.onerror = (event) => container.replaceChildren(h("p", { class: "warning" }, `The layout failed: ${event.message}. Use the side-by-side view.`));
  layoutWorker.onmessage = (event) => {
    if (request === layoutRequest && state.view === "graph") showLayout(container, groups, edges, event.data, all.length - groups.length);
  };
  layoutWorker.postMessage({ nodes: groups.map(({ id, width, height }) => ({ id, width, height })), edges: edges.map(({ from, to }) => [from, to]) });
}

/** Are both sides of a group drawn alike? */
const isSame = ({ before, after }) => before.length === after.length && before.every((box, index) => ["text", "small", "kind"].every((key) => box[key] === after[index][key]));

function showLayout(container, groups, edges, layout, left) {
  const places = new Map(layout.nodes.map((node) => [node.id, node]));
  const added = groups.filter((group) => !group.before.length); // what is only after needs no second graph
  const sides = groups.every((group) => isSame(group) || added.includes(group)) ? ["after"] : SIDES;
  const room = container.clientWidth / sides.length - 4;
  const scale = Math.min(1, Math.max(SMALLEST, room / layout.width));
  const width = Math.max(layout.width, room / scale);
  const drawn = new Map(groups.map((group) => [group.id, []])); // the elements of a group on both sides
  const panes = sides.map((side) => h("div", {}, s("svg", { width: width * scale, height: layout.height * scale, viewBox: `0 0 ${width} ${layout.height}`, role: "group", "aria-label": `Graph of equations ${side}` },
    s("defs", {}, s("marker", { id: `arrow-${side}`, viewBox: "0 0 6 6", refX: 6, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" }, s("path", { d: "M0 0L6 3L0 6z" }))),
    s("g", { class: `pane ${side}`, transform: `translate(${(width - layout.width) / 2} 0)` },
      edges.map((edge, number) => (edge.sides.has(side) ? drawEdge(edge, side, groups, places, layout.edges[number]) : null)),
      groups.map((group) => drawGroup(group, side, places.get(group.id), drawn.get(group.id)))))));
  container.replaceChildren(sides.length > 1 ? sideHeads() : h("p", { class: "quiet" }, added.length ? `The graph before is the same, but without ${added.map((group) => group.after[0].text).join(", ")}.` : "The graph is the same before and after."),
    h("div", { class: sides.length > 1 ? "graph" : "graph single" }, panes),
    h("p", { class: "quiet" }, sides.length > 1 ? "Boxes next to each other correspond to each other. " : "", "Click a scope or a run to open it.",
      left ? ` ${left} of the groups are left out: open a smaller scope.` : ""));
  if (sides.length > 1) scrollTogether(panes);
  markCurrent();
}

/** Scrolling one side scrolls the other. */
function scrollTogether([one, other]) {
  for (const [from, to] of [[one, other], [other, one]]) {
    from.addEventListener("scroll", () => {
      if (to.scrollTop !== from.scrollTop || to.scrollLeft !== from.scrollLeft) to.scrollTo(from.scrollLeft, from.scrollTop);
    });
  }
  one.scrollLeft = (one.scrollWidth - one.clientWidth) / 2;
}

/** The top of a box of a group: both sides end at the same height, since the last equation gives the result. */
const boxTop = (group, side, place, index) => place.y + group.height / 2 - (group[side].length - index) * (BOX.height + BOX.gap) + BOX.gap;

function drawEdge(edge, side, groups, places, points) {
  const [from, to] = [edge.from, edge.to].map((id) => groups.find((group) => group.id === id));
  const [start, end] = [places.get(edge.from), places.get(edge.to)];
  const inner = points.slice(1, -1);
  const line = [{ x: start.x, y: start.y + from.height / 2 }, ...inner, { x: end.x, y: boxTop(to, side, end, 0) }];
  const text = (point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
  const middle = (a, b) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  const bends = line.slice(1, -1).map((point, index) => `Q${text(point)} ${text(index + 2 === line.length - 1 ? line.at(-1) : middle(point, line[index + 2]))}`);
  return s("path", { class: "edge", d: bends.length ? `M${text(line[0])}${bends.join("")}` : `M${text(line[0])}L${text(line[1])}`, "marker-end": `url(#arrow-${side})` });
}

function drawGroup(group, side, place, drawn) {
  const boxes = group[side];
  if (!boxes.length) return null;
  const hover = (isHot) => () => drawn.forEach((element) => element.classList.toggle("hot", isHot));
  const [top, bottom] = [boxTop(group, side, place, 0), place.y + group.height / 2];
  const frame = boxes.length > 1 ? s("rect", { class: "frame", x: place.x - group.width / 2 - 5, y: top - 5, width: group.width + 10, height: bottom - top + 10, rx: 7 }) : null;
  const links = boxes.slice(1).map((box, index) => (readsResult(box.number, boxes[index].number)
    ? s("path", { class: "edge", d: `M${place.x} ${boxTop(group, side, place, index) + BOX.height}v${BOX.gap}` }) : null));
  const element = s("g", { class: "group", pointerenter: hover(true), pointerleave: hover(false) }, frame, links,
    boxes.map((box, index) => drawBox(box, group.width, place.x - group.width / 2, boxTop(group, side, place, index))));
  drawn.push(element);
  return element;
}

function drawBox(box, width, x, y) {
  const keys = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); box.open(); } };
  const element = s("g", { class: `box ${box.kind}`, transform: `translate(${x} ${y})`, "data-node": box.number,
    ...(box.open ? { tabindex: 0, role: "button", click: box.open, keydown: keys } : {}) },
  s("title", {}, box.title),
  s("rect", { width, height: BOX.height, rx: 4 }),
  box.color ? s("rect", { class: "strip", width: 5, height: BOX.height, rx: 2, style: `fill:${box.color}` }) : null,
  s("text", { x: width / 2, y: 15, "text-anchor": "middle" }, shortenRight(visible(box.text), BOX.most), box.count > 1 ? ` ×${box.count}` : "", box.open ? " ▸" : ""),
  s("text", { x: width / 2, y: 28, "text-anchor": "middle", class: "small" }, shortenRight(visible(box.small), BOX.most + 2)));
  if (box.cell) figures.push([element, box.cell]);
  return element;
}

const shortenRight = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
