// Level 2: one class of layers. Three tensors become six operands, which flow into three products. Coordinates are fixed.

const CARD = { width: 580, tensor: 76, operand: 246, product: 142, row: 36, gap: 10 };
const TENSORS = ["activation", "lhs", "weight", "rhs", "gradient"]; // lhs and rhs: of a GEMM without a weight
const layerFacts = { shared: [], hoisted: [] }; // operands that are quantized once, for several linears or per step

/** The operands that an equation quantizes: `operand=fprop.lhs`, or `operands=(fprop.lhs,wgrad.lhs)` for two at once. */
function quantizedOperands(node) {
  const text = isScope(node) ? null : /\boperands?=\(?([\w.,]+)/.exec(node.params ?? "");
  return text ? text[1].split(",").filter((operand) => /^\w+\.(lhs|rhs)$/.test(operand)) : [];
}

/** Finds the operands that are quantized once for several linears, or once per step. */
function collectQuantizations() {
  const visit = (number, layers) => {
    const node = graph.nodes[number];
    const inside = node.members ?? (node.iterations ? [node.iterations] : layers);
    for (const operand of node.side === "before" ? [] : quantizedOperands(node)) {
      const [product, position] = operand.split(".");
      const fact = { product, position: position === "lhs" ? 0 : 1, layers: inside, linear: node.linear, readers: node.readers ?? [] };
      if (node.reason === "shared") layerFacts.shared.push(fact);
      if (node.reason === "hoisted") layerFacts.hoisted.push(fact);
    }
    for (const child of node.children ?? []) visit(child, inside);
  };
  if (graph.nodes.length) visit(0, null);
}

function findFact(facts, isOf, product, position, layer) {
  return facts.find((fact) => isOf(fact) && fact.product === product && fact.position === position
    && (!fact.layers || fact.layers.some(([first, last]) => first <= layer && layer <= last)));
}

function readClass() {
  const [number, index] = state.cls.split(".").map(Number);
  const stack = data.stacks[number] ?? data.stacks[0];
  return { number: data.stacks.indexOf(stack), stack, index: stack && stack.classes[index] ? index : 0 };
}

function drawClasses() {
  const current = readClass();
  if (!current.stack) return;
  const tab = (number, index, text) => {
    const isCurrent = number === current.number && index === current.index;
    return h("button", { type: "button", role: "tab", "aria-selected": String(isCurrent), "aria-controls": "cards",
      click: () => setState({ cls: `${number}.${index}` }) }, text);
  };
  byId("classes").replaceChildren(...data.stacks.flatMap((stack, number) => (stack.classes.length
    ? stack.classes.map((each, index) => tab(number, index, `${stack.name} ${each.label.replace(" x", " ×")}`))
    : [tab(number, 0, "outside of stacks")])));
  const { stack, index } = current;
  const layer = stack.classes[index] ? stack.classes[index].layers[0][0] : 0;
  const isOfOneLayer = stack.size && currentOverlay().perLayer;
  byId("classes").append(isOfOneLayer ? h("span", { class: "quiet" }, `${currentOverlay().name} of layer ${layer}`) : "");
  byId("cards").replaceChildren(...stack.linears.map((number) => drawCard(number, layer)).filter(Boolean));
}

function drawCard(number, layer) {
  const linear = data.linears[number];
  const own = GEMMS.map((product) => cellAt(number, product, layer)).filter(Boolean);
  if (!own.length) return null;
  const { run } = own[0];
  const isChanged = own.some((cell) => cell.change.changed);
  const isKept = readCell()?.cell.number === number;
  return h("article", { class: "card flow" + (isKept ? " current" : "") + (isChanged ? "" : " unchanged") },
    h("h3", {}, linear.name, " ", h("small", {}, `${run.batch > 1 ? run.batch + " × " : ""}${run.m} × ${run.n} × ${run.k}`),
      " ", copyButton(fullName(linear), "copy path")),
    drawFlow(number, own, layer));
}

function drawFlow(number, own, layer) {
  const { width, tensor, operand, product, row, gap } = CARD;
  const height = own.length * (2 * row + gap);
  const tensors = TENSORS.filter((role) => own.some((cell) => operandsAfter(cell).some((each) => each.role === role)));
  const tensorY = (role) => (height * (tensors.indexOf(role) + 0.5)) / tensors.length - 5;
  const x1 = tensor + 50;
  const x2 = width - product;
  const parts = tensors.map((role) => s("g", { class: "tensor" },
    s("rect", { x: 1, y: tensorY(role) - 13, width: tensor, height: 26, rx: 13 }),
    s("text", { x: 1 + tensor / 2, y: tensorY(role) + 4, "text-anchor": "middle" }, role)));
  own.forEach((cell, index) => {
    const top = index * (2 * row + gap);
    const middle = top + row - 1;
    operandsAfter(cell).forEach((each, position) => {
      const y = top + position * row;
      const from = tensorY(each.role);
      parts.push(s("path", { class: "edge", d: `M${tensor + 1} ${from}C${tensor + 30} ${from} ${x1 - 25} ${y + 16} ${x1} ${y + 16}` }));
      parts.push(s("path", { class: "edge", d: `M${x1 + operand} ${y + 16}C${x1 + operand + 26} ${y + 16} ${x2 - 26} ${middle} ${x2} ${middle}` }));
      parts.push(drawOperand(number, cell, each, { position, x: x1, y, layer }));
    });
    parts.push(drawProduct(cell, layer, x2, middle));
  });
  return s("svg", { viewBox: `0 0 ${width + 2} ${height}`, role: "img", "aria-label": "Operands and products of " + visible(data.linears[number].name) }, parts);
}

const operandsAfter = (cell) => (stateOf(cell.change.after) ?? stateOf(cell.change.before)).operands;

function drawOperand(number, cell, operand, { position, x, y, layer }) {
  const shared = findFact(layerFacts.shared, (fact) => fact.readers.includes(number), cell.product, position, layer);
  const hoisted = findFact(layerFacts.hoisted, (fact) => fact.linear === number, cell.product, position, layer);
  const names = shared ? shared.readers.map((reader) => shortNames[reader]) : [];
  const mark = shared ? `once for ${shared.readers.length} linears` : (hoisted ? "once per step" : "");
  return s("g", { class: "operand" + (mark ? " once" : "") },
    s("title", {}, [operand.role, operand.format, ...operand.options].join(" ") + (mark ? `, quantized ${mark}` : "") + (names.length ? ": " + names.join(", ") : "")),
    s("rect", { x, y: y + 1, width: CARD.operand, height: 31, rx: 4 }),
    s("rect", { x, y: y + 1, width: 6, height: 31, rx: 2, style: `fill:${formatColor(operand.format)}` }),
    s("text", { x: x + 13, y: y + 13 }, `${operand.role} `, s("tspan", { class: "strong" }, operand.format)),
    s("text", { x: x + 13, y: y + 27, class: "small" }, operand.options.join(" · ") || "as it is"),
    mark ? s("text", { x: x + CARD.operand - 7, y: y + 13, class: "mark", "text-anchor": "end" }, mark) : null);
}

/** The value of the current overlay for a product, or its predicted time. */
function measure(cell, layer, side = "after") {
  const overlay = currentOverlay();
  if (overlay.kind === "word") return overlay.value(cell, side, layer);
  const { print, value } = overlay.kind === "number" ? overlay : OVERLAYS.time;
  const number = value(cell, side, layer);
  return number === null ? null : print(number);
}

function drawProduct(cell, layer, x, y) {
  const [before, after] = SIDES.map((side) => stateOf(cell.change[side]));
  const formats = before && after && before.format !== after.format ? `${before.format} → ${after.format}` : (after ?? before).format;
  const note = cell.run.opaque ? "opaque" : (after && after.backend ? (after.native ? `native, ${after.backend}` : "emulated") : "");
  return s("g", { class: "output" + (cell.change.changed ? " changed" : "") },
    s("rect", { x, y: y - 25, width: CARD.product, height: 50, rx: 5 }),
    s("rect", { x: x + CARD.product - 7, y: y - 25, width: 7, height: 50, rx: 2, style: `fill:${formatColor((after ?? before).format)}` }),
    isHatched(cell) ? s("rect", { x: x + CARD.product - 7, y: y - 25, width: 7, height: 50, style: "fill:url(#hatch)" }) : null,
    s("text", { x: x + 10, y: y - 9, class: "strong" }, cell.product),
    s("text", { x: x + 10, y: y + 5 }, formats),
    s("text", { x: x + 10, y: y + 18, class: "small" }, [note, measure(cell, layer)].filter(Boolean).join(" · ")));
}

function startLayers() {
  collectQuantizations();
  drawClasses();
  watch(["cls", "cell", "overlay"], drawClasses);
}
