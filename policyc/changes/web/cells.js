// The cells of the heat map: one record for each product of each run of layers, what decides it, and what describes it.

const FORMATS = [...new Set(data.states.map((state) => state.format))];
const KNOWN_FORMATS = ["nvfp4", "nvfp4_ue5m3", "mxfp4", "mxfp8", "fp8", "fp4", "bf16", "f32"];
const fullName = (linear) => (linear.stack && linear.stack !== linear.name ? linear.stack + "." + linear.name : linear.name);
const formatColor = (format) => (KNOWN_FORMATS.includes(format) ? `var(--${format})` : "var(--other)");
const stateOf = (side) => data.states[side.state];

const cells = data.linears.flatMap((linear, number) => linear.runs.flatMap((run) => GEMMS
  .filter((product) => run.products[product])
  .map((product) => ({
    number, linear, run, product, change: run.products[product],
    first: run.layers ? run.layers[0] : 0, last: run.layers ? run.layers[1] : 0,
  }))));

const layerCount = (cell) => cell.last - cell.first + 1;

function cellAt(number, product, layer) {
  return cells.find((cell) => cell.number === number && cell.product === product
    && cell.first <= layer && layer <= cell.last);
}

/** Hatched: it is emulated, or the compiler cannot change it. */
function isHatched(cell) {
  return Boolean(cell.run.opaque) || stateOf(cell.change.after).native === false;
}

// ---- rules: "a3" is rule 3 of the policy after, "b0" is rule 0 of the policy before

function ruleOf(key) {
  const policy = data[key[0] === "a" ? "after" : "before"].policy;
  return policy ? policy.rules[Number(key.slice(1))] ?? null : null;
}

const rulePlace = (rule) => data.sources[rule.source].path + ":" + rule.line;

const ruleKeys = SIDES.flatMap((side) => (data[side].policy ? data[side].policy.rules : [])
  .map((_, number) => side[0] + number));

function keysOf(cell) {
  return SIDES.filter((side) => cell.change[side].rule !== null)
    .map((side) => side[0] + cell.change[side].rule);
}

/** Keys of rules at the same place: both policies may import it. */
function sameRules(key) {
  const rule = ruleOf(key);
  return rule === null ? [] : ruleKeys.filter((other) => {
    const candidate = ruleOf(other);
    return candidate.source === rule.source && candidate.start === rule.start;
  });
}

// ---- filters

const FILTERS = ["q", "rule", "format", "product", "changed"];
const isFiltered = () => FILTERS.some((name) => state[name]);
const isSearched = (texts) => !state.q || texts.some((text) => text?.toLowerCase().includes(state.q.toLowerCase()));

/** Do product, format and rule leave this cell? */
function isSelected(cell) {
  if (state.product && cell.product !== state.product) return false;
  if (state.format && !SIDES.some((side) => stateOf(cell.change[side]).format === state.format)) return false;
  return !state.rule || sameRules(state.rule).some((key) => keysOf(cell).includes(key));
}

const searchTexts = (cell) => [fullName(cell.linear), cell.run.kind, cell.run.place, ...keysOf(cell).map((key) => ruleOf(key).text)];
const isShown = (cell) => isSelected(cell) && (!state.changed || cell.change.changed) && isSearched(searchTexts(cell));

/** `bf16 → nvfp4`, or one format if it stays. */
function formatChange(cell) {
  const [before, after] = SIDES.map((side) => stateOf(cell.change[side]).format);
  return before === after ? after : `${before} → ${after}`;
}

// ---- descriptions

const badge = (text) => h("span", { class: "badge", title: explain(text) || null }, text);

function formatChip(format) {
  return h("span", { class: "chip" }, h("i", { style: `background:${formatColor(format)}` }), format);
}

function describeSide(cell, side) {
  const product = cell.change[side];
  const header = h("h4", {}, side, " ", h("small", {}, data[side].label));
  const run = stateOf(product);
  const rule = product.rule === null ? null : ruleOf(side[0] + product.rule);
  return h("div", {}, header,
    run.operands.map((operand) => h("p", { class: "operand" },
      h("span", { class: "role" }, operand.role), " ", formatChip(operand.format), " ",
      operand.options.map((text) => [badge(text), " "]))),
    run.seed === null ? null : h("p", {}, `seed ${run.seed}`),
    run.backend ? h("p", {}, run.native ? `native, ${data.backend_names[run.backend]}` : "emulated") : null,
    run.reason ? h("p", { class: "warning" }, run.reason, run.remedy ? ". " + run.remedy : "") : null,
    h("p", {}, `${duration(product.seconds)} predicted, ${withPrefix(product.bytes, "B")}`),
    rule ? h("p", { class: "rule-text" }, h("code", {}, rule.text), h("br"),
      h("span", { class: "quiet" }, rulePlace(rule))) : null);
}

/** What a reader of a cell wants to know. With `isKept`, it has buttons. */
function describeCell(cell, layer, isKept) {
  const { run, linear } = cell;
  const index = run.layers ? `[${layer}]` : "";
  const path = linear.stack ? `${linear.stack}${index}${linear.name === linear.stack ? "" : "." + linear.name}` : linear.name;
  const extra = overlayTexts(cell, layer);
  return [
    h("h3", {}, path, " ", h("em", {}, cell.product), isKept ? [" ", copyButton(path, "copy path"), " ",
      h("button", { type: "button", class: "copy", click: () => showEquations(cell) }, "equations")] : null),
    h("p", {}, `${run.batch > 1 ? run.batch + " × " : ""}m ${run.m} · n ${run.n} · k ${run.k}`,
      run.kind ? ` · ${run.kind}` : "", ` · ${withPrefix(run.flops, "FLOP")}`,
      run.repeats > 1 ? ` · ${run.repeats} times per step` : ""),
    run.opaque ? h("p", { class: "warning" }, "opaque: " + run.opaque) : null,
    h("div", { class: "sides" }, SIDES.map((side) => describeSide(cell, side))),
    extra.map((text) => h("p", {}, text)),
    h("p", { class: "quiet place" }, run.place, isKept ? [" ", copyButton(run.place, "copy")] : null),
  ];
}
