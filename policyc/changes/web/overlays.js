// Overlays: what the colors of the heat map stand for. Each has a value for a product of a layer, before or after.

const stats = data.overlays.stats ?? null;

const isLayer = (entry, layer) => entry.layer === null || entry.layer === undefined || entry.layer === layer;
const operandsOf = (cell, layer) => (stats ? stats.operands : []).filter((entry) => entry.linear === cell.number
  && isLayer(entry, layer) && String(entry.operand).startsWith(cell.product));
const cosineOf = (cell, layer) => (stats && cell.product === "wgrad" ? stats.cosines : [])
  .find((entry) => entry.linear === cell.number && isLayer(entry, layer))?.cosine ?? null;

function lowestSqnr(cell, layer) {
  const values = operandsOf(cell, layer).map((entry) => entry.sqnr_db).filter((value) => typeof value === "number");
  return values.length ? Math.min(...values) : null;
}

function execution(cell, side) {
  const product = stateOf(cell.change[side]);
  if (cell.run.opaque) return "opaque";
  if (product.native === null) return "not quantized";
  return product.native ? "native" : "emulated";
}

const OVERLAYS = {
  "": { name: "format", kind: "format" },
  flops: { name: "FLOPs", kind: "number", print: (v) => withPrefix(v, "FLOP"), value: (cell) => cell.run.flops },
  time: { name: "predicted time", kind: "number", print: duration, value: (cell, side) => cell.change[side].seconds },
  bytes: { name: "bytes", kind: "number", print: (v) => withPrefix(v, "B"), value: (cell, side) => cell.change[side].bytes },
  native: { name: "native or emulated", kind: "word", value: execution },
};
if (stats) {
  OVERLAYS.sqnr = { name: "SQNR", kind: "number", perLayer: true, print: (v) => v.toFixed(1) + " dB",
    value: (cell, side, layer) => (side === "after" ? lowestSqnr(cell, layer) : null) };
  OVERLAYS.cosine = { name: "gradient cosine", kind: "number", perLayer: true, print: (v) => v.toFixed(4),
    value: (cell, side, layer) => (side === "after" ? cosineOf(cell, layer) : null) };
}

const currentOverlay = () => OVERLAYS[state.overlay] ?? OVERLAYS[""];

/** Texts of the measurements of a product of a layer. */
function overlayTexts(cell, layer) {
  const texts = operandsOf(cell, layer).filter((entry) => typeof entry.sqnr_db === "number")
    .map((entry) => `${entry.operand}: SQNR ${entry.sqnr_db.toFixed(1)} dB`);
  const cosine = cosineOf(cell, layer);
  if (typeof cosine === "number") texts.push(`gradient cosine ${cosine.toFixed(4)}`);
  return texts;
}

/** The scale of the current overlay: a function from values to colors, and the entries of its legend. */
function overlayScale() {
  const overlay = currentOverlay();
  if (overlay.kind === "format") {
    return { color: (cell, side) => formatColor(stateOf(cell.change[side]).format),
      entries: FORMATS.map((format) => [formatColor(format), format]) };
  }
  const values = new Set();
  for (const cell of cells) {
    for (let layer = cell.first; layer <= (overlay.perLayer ? cell.last : cell.first); layer += 1) {
      for (const side of SIDES) values.add(overlay.value(cell, side, layer));
    }
  }
  values.delete(null);
  const missing = "var(--missing)";
  if (overlay.kind === "word") {
    const words = [...values];
    const color = (word) => (word === null ? missing : `var(--word${words.indexOf(word) % 6})`);
    return { color: (cell, side, layer) => color(overlay.value(cell, side, layer)),
      entries: words.map((word) => [color(word), word]) };
  }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const ramp = (value) => {
    if (value === null) return missing;
    const share = high > low ? (100 * (value - low)) / (high - low) : 100;
    return `color-mix(in oklab, var(--low), var(--high) ${share.toFixed(1)}%)`;
  };
  return { color: (cell, side, layer) => ramp(overlay.value(cell, side, layer)),
    entries: values.size ? [[ramp(low), overlay.print(low)], [ramp((low + high) / 2), overlay.print((low + high) / 2)],
      [ramp(high), overlay.print(high)]] : [[missing, "no values"]] };
}
