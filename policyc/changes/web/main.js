// Starts the page: header, tools, and the three levels.

function drawHeader() {
  byId("subject").replaceChildren(h("bdi", {}, data.before.label), " → ", h("b", {}, data.after.label), ", loss of ", h("b", { title: visible(data.program) }, data.program));
  byId("sentence").replaceChildren(visible(data.sentence).replaceAll(" %", "\u00a0%"));
  const seconds = SIDES.map((side) => data[side].seconds);
  const hashes = SIDES.filter((side) => data[side].policy).map((side) => `${data[side].label} ${data[side].policy.sha256.slice(0, 12)}`);
  byId("facts").replaceChildren(visible([
    data.phase === "always" ? null : `phase ${data.phase}`,
    seconds.every((each) => each !== null) ? `predicted step ${duration(seconds[0])} → ${duration(seconds[1])}` : null,
    ...hashes,
  ].filter(Boolean).join(" · ")));
  const counts = new Map();
  for (const cell of cells.filter((each) => each.change.changed)) counts.set(formatChange(cell), (counts.get(formatChange(cell)) ?? 0) + layerCount(cell));
  byId("changes").replaceChildren(...[...counts].map(([text, number]) => h("span", { class: "chip" }, h("i", { style: `background:${formatColor(text.split(" → ").at(-1))}` }),
    `${text.includes("→") ? text : `${text}, other options`}: ${count(number, "product")}`)));
  byId("remarks").replaceChildren(...data.notes.map((note) => h("p", { class: "quiet" }, "Note: " + note)));
  byId("notes").replaceChildren(h("p", { class: "quiet" }, "Made by policyc diff. Times are predictions of its cost model; nothing was executed."));
}

// ---- tools

function fillSelect(id, entries) {
  byId(id).replaceChildren(...entries.map(([value, text]) => h("option", { value }, text)));
  byId(id).addEventListener("change", (event) => setState({ [id]: event.target.value }));
}

function showTools() {
  for (const id of ["q", "rule", "format", "product", "overlay"]) if (byId(id).value !== state[id]) byId(id).value = state[id];
  byId("changed").checked = Boolean(state.changed);
}

function startTools() {
  const places = new Map(ruleKeys.map((key) => [sameRules(key)[0], key]));
  fillSelect("rule", [["", "all"], ...[...places.keys()].map((key) => [key, `${rulePlace(ruleOf(key)).split("/").at(-1)}  ${ruleOf(key).text.slice(0, 60)}`])]);
  fillSelect("format", [["", "all"], ...FORMATS.map((format) => [format, format])]);
  fillSelect("product", [["", "all"], ...GEMMS.map((product) => [product, product])]);
  fillSelect("overlay", Object.entries(OVERLAYS).map(([key, overlay]) => [key, overlay.name]));
  byId("changed").addEventListener("change", (event) => setState({ changed: event.target.checked ? "1" : "" }));
  byId("q").addEventListener("input", (event) => setState({ q: event.target.value }));
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => setState({ ...DEFAULTS }));
  byId("link").addEventListener("click", (event) => copyText(location.href, event.currentTarget));
  byId("csv").addEventListener("click", saveCsv);
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); byId("q").focus(); }
  });
  watch(Object.keys(DEFAULTS), showTools);
  showTools();
}

// ---- CSV

const CSV_COLUMNS = ["site", "first_layer", "last_layer", "product", "changed", "batch", "m", "n", "k", "flops",
  ...SIDES.flatMap((side) => ["format", "operands", "backend", "native", "rule", "rule_place", "seconds", "bytes"].map((name) => `${name}_${side}`)),
  "opaque", "place"];

function csvSide(cell, side) {
  const product = cell.change[side];
  const run = stateOf(product);
  const rule = product.rule === null ? null : ruleOf(side[0] + product.rule);
  const operands = run.operands.map((operand) => [operand.role, operand.format, ...operand.options].join(" ")).join("; ");
  return [run.format, operands, run.backend, run.native, rule?.text, rule ? rulePlace(rule) : "", product.seconds, product.bytes];
}

/** The table of all products that the filters leave, one line for each run of layers. */
function csvText() {
  const text = (value) => String(value ?? "").replace(/^[=+\-@\t\r]/, "'$&"); // a spreadsheet would take it for a formula
  const quote = (value) => `"${text(value).replaceAll('"', '""')}"`;
  const rows = cells.filter(isShown).map((cell) => [fullName(cell.linear), cell.run.layers?.[0], cell.run.layers?.[1], cell.product, cell.change.changed,
    cell.run.batch, cell.run.m, cell.run.n, cell.run.k, cell.run.flops, ...SIDES.flatMap((side) => csvSide(cell, side)), cell.run.opaque, cell.run.place]);
  return [CSV_COLUMNS, ...rows].map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
}

function saveCsv() {
  const link = h("a", { href: URL.createObjectURL(new Blob([csvText()], { type: "text/csv" })), download: "policyc-diff.csv" });
  document.body.append(link);
  link.click();
  link.remove();
  URL.revokeObjectURL(link.href);
}

// ---- start

readHash();
drawHeader();
startTools();
startPolicies();
startMap();
startLayers();
startEquations();
if (state.view !== DEFAULTS.view || state.scope !== DEFAULTS.scope) byId("level3").scrollIntoView(); // a link to it
document.documentElement.dataset.ready = "true";
addEventListener("hashchange", () => { readHash(); notify(Object.keys(DEFAULTS)); });
