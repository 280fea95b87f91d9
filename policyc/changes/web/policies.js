// The policy text beside the heat map. Rules light up for the cells that they decide, and choose those cells on a click.

const ruleLines = []; // [element, keys of the rules on this line]

function drawPolicies() {
  const box = byId("policies");
  if (!data.sources.length) {
    box.replaceChildren(h("p", { class: "quiet" }, "Neither side has a policy text."));
    return;
  }
  box.replaceChildren(...data.sources.map(drawSource));
  lightRules();
}

function drawSource(source, number) {
  const keysByLine = new Map();
  for (const key of ruleKeys) {
    const rule = ruleOf(key);
    if (rule.source !== number) continue;
    for (let line = rule.line; line <= rule.last_line; line += 1) keysByLine.set(line, [...(keysByLine.get(line) ?? []), key]);
  }
  const lines = source.text.replace(/\n$/, "").split("\n");
  const comments = lines.findIndex((text) => !text.startsWith("#"));
  return h("div", { class: "source" },
    h("h3", {}, h("bdi", {}, source.path.split("/").at(-1)), " ", copyButton(source.path, "copy path")),
    comments > 1 ? h("details", {}, h("summary", {}, `${comments} lines of comments`), h("ol", {}, lines.slice(0, comments).map((text, index) => drawLine(text, null, index + 1)))) : null,
    h("ol", {}, lines.map((text, index) => [text, index + 1]).slice(comments > 1 ? comments : 0).map(([text, line]) => drawLine(text, keysByLine.get(line), line))));
}

function drawLine(text, keys, line) {
  if (!keys) return h("li", { value: line, class: text.trimStart().startsWith("#") ? "comment" : "" }, text || " ");
  const choose = () => setState({ rule: sameRules(keys[0]).includes(state.rule) ? "" : keys[0] });
  const products = cells.filter((cell) => keysOf(cell).some((key) => keys.includes(key)))
    .reduce((sum, cell) => sum + layerCount(cell), 0);
  const element = h("li", {
    value: line, class: "rule", tabindex: 0, role: "button", "aria-pressed": "false",
    title: `${count(products, "product")}. Click to highlight them.`, click: choose,
    keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } },
  }, text, " ", h("span", { class: "count" }, products ? count(products, "product") : "decides nothing"));
  ruleLines.push([element, keys]);
  return element;
}

/** Lights the rules of the cell under the pointer, else those of the brushed layers, else those of the kept cell. */
function lightRules(pointed) {
  const brush = readBrush();
  const kept = readCell();
  let keys = pointed ?? [];
  if (!pointed && brush) {
    const { linears } = data.stacks[brush.number];
    keys = cells.filter((cell) => linears.includes(cell.number) && cell.first <= brush.last && brush.first <= cell.last).flatMap(keysOf);
  } else if (!pointed && kept) keys = keysOf(kept.cell);
  const lit = new Set(keys);
  const chosen = new Set(state.rule ? sameRules(state.rule) : []);
  for (const [element, own] of ruleLines) {
    element.classList.toggle("lit", own.some((key) => lit.has(key)));
    element.classList.toggle("chosen", own.some((key) => chosen.has(key)));
    element.setAttribute("aria-pressed", String(own.some((key) => chosen.has(key))));
  }
}

function startPolicies() {
  drawPolicies();
  watch(["rule", "brush", "cell"], () => lightRules());
}
