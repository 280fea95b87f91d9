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

/** The classes of layers of all stacks, each with the cells of its first layer that the filters leave. */
function listClasses() {
  return data.stacks.flatMap((stack, number) => (stack.classes.length ? stack.classes : [null]).map((each, index) => {
    const layer = each ? each.layers[0][0] : 0;
    const own = cells.filter((cell) => stack.linears.includes(cell.number) && cell.first <= layer && layer <= cell.last);
    const label = each ? `${stack.name} ${each.label.replace(" x", " ×")}` : "outside of stacks";
    return { key: `${number}.${index}`, stack, layer, label, shown: own.filter(isShown) };
  }));
}

const changesOf = (each) => each.shown.filter((cell) => cell.change.changed).length;

function drawClasses() {
  const classes = listClasses();
  const chosen = classes.find((each) => each.key === state.cls && each.shown.length);
  // It opens where something changes: the policies may differ in a few layers only.
  const current = chosen ?? classes.find(changesOf) ?? classes.find((each) => each.shown.length && each.stack.size) ?? classes.find((each) => each.shown.length);
  byId("classes").replaceChildren(...classes.map((each) => h("button", { type: "button", role: "tab", "aria-selected": String(each === current), "aria-controls": "cards",
    disabled: !each.shown.length, click: () => setState({ cls: each.key }) }, each.label, h("small", {}, changesOf(each) ? ` ${changesOf(each)} change` : " unchanged"))));
  if (!current) {
    byId("cards").replaceChildren(h("p", { class: "quiet" }, "No product matches the filters."));
    drawWords([]);
    return;
  }
  const { stack, layer } = current;
  if (stack.size && currentOverlay().perLayer) byId("classes").append(h("span", { class: "quiet" }, `${currentOverlay().name} of layer ${layer}`));
  const words = [];
  const linears = [...new Set(current.shown.map((cell) => cell.number))];
  const isChanged = (number) => current.shown.some((cell) => cell.number === number && cell.change.changed);
  byId("cards").replaceChildren(...linears.filter(isChanged).map((number) => drawCard(number, layer, true, words)),
    ...linears.filter((number) => !isChanged(number)).map((number) => drawCard(number, layer, false, words)));
  drawWords([...words, ...cells.flatMap((cell) => [cell.product, execution(cell, "after")])]);
}

/** The operands and products of a linear in one layer. Those of one that does not change are folded. */
function drawCard(number, layer, isChanged, words) {
  const linear = data.linears[number];
  const own = GEMMS.map((product) => cellAt(number, product, layer)).filter(Boolean);
  const isKept = readCell()?.cell.number === number;
  const title = [linear.name, " ", h("small", {}, describeLinear(linear)), " ", copyButton(fullName(linear), "copy path")];
  const name = "card flow" + (isKept ? " current" : "");
  if (isChanged) return h("article", { class: name }, h("h3", {}, title), drawFlow(number, own, layer, words));
  const formats = [...new Set(own.map((cell) => stateOf(cell.change.after).format))];
  return h("details", { class: name + " unchanged", open: isKept }, h("summary", {}, h("h3", {}, title), formats.map(formatChip)), drawFlow(number, own, layer, isKept ? words : []));
}

function drawFlow(number, own, layer, words) {
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
      parts.push(drawOperand(number, cell, each, { position, x: x1, y, layer, words }));
    });
    parts.push(drawProduct(cell, layer, x2, middle));
  });
  return s("svg", { viewBox: `0 0 ${width + 2} ${height}`, role: "img", "aria-label": "Operands and products of " + visible(data.linears[number].name) }, parts);
}

const operandsAfter = (cell) => stateOf(cell.change.after).operands;

function drawOperand(number, cell, operand, { position, x, y, layer, words }) {
  const shared = findFact(layerFacts.shared, (fact) => fact.readers.includes(number), cell.product, position, layer);
  const hoisted = findFact(layerFacts.hoisted, (fact) => fact.linear === number, cell.product, position, layer);
  const names = shared ? shared.readers.map((reader) => data.linears[reader].short_name) : [];
  const mark = shared ? `once for ${shared.readers.length} sites` : (hoisted ? "once per step" : "");
  const before = stateOf(cell.change.before).operands[position];
  const isRounded = before.format !== operand.format;
  const own = [operand.role, ...operand.options, ...(mark ? [mark] : [])].filter(explain);
  words.push(...own);
  return s("g", { class: "operand" + (mark ? " once" : "") },
    s("title", {}, [`${operand.role} ${isRounded ? `${before.format} → ` : ""}${operand.format}`, ...own.map((word) => `${word}: ${explain(word)}`), ...(names.length ? [names.join(", ")] : [])].join("\n")),
    s("rect", { x, y: y + 1, width: CARD.operand, height: 31, rx: 4 }),
    s("rect", { x, y: y + 1, width: 6, height: 31, rx: 2, style: `fill:${formatColor(operand.format)}` }),
    s("text", { x: x + 13, y: y + 13 }, `${operand.role} `, isRounded ? `${before.format} → ` : "", s("tspan", { class: "strong" }, operand.format)),
    s("text", { x: x + 13, y: y + 27, class: "small" }, operand.options.join(" · ") || (isRounded ? "rounded" : "as it is")),
    mark ? s("text", { x: x + CARD.operand - 7, y: y + 27, class: "mark", "text-anchor": "end" }, mark) : null);
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
  const after = stateOf(cell.change.after);
  const note = cell.run.opaque ? "opaque" : (after.backend ? (after.native ? "native" : "emulated") : "");
  const values = [...new Set((cell.change.changed ? SIDES : ["after"]).map((side) => measure(cell, layer, side)))].filter(Boolean);
  const [top, height] = [y - 29, 58];
  return s("g", { class: "output" + (cell.change.changed ? " changed" : "") },
    s("title", {}, [cell.product, note].filter(explain).map((word) => `${word}: ${explain(word)}${word === "native" ? ` (${data.backend_names[after.backend]})` : ""}`).join("\n")),
    s("rect", { x, y: top, width: CARD.product, height, rx: 5 }),
    s("rect", { x: x + CARD.product - 7, y: top, width: 7, height, rx: 2, style: `fill:${formatColor(after.format)}` }),
    isHatched(cell) ? s("rect", { x: x + CARD.product - 7, y: top, width: 7, height, style: "fill:url(#hatch)" }) : null,
    s("text", { x: x + 10, y: y - 14, class: "strong" }, cell.product, note ? s("tspan", { class: "small" }, `  ${note}`) : null),
    s("text", { x: x + 10, y: y + 3 }, formatChange(cell)),
    s("text", { x: x + 10, y: y + 19, class: "small" }, values.join(" → ")));
}

function startLayers() {
  collectQuantizations();
  drawClasses();
  watch(["cls", "cell", "overlay", ...FILTERS], drawClasses);
}
