// The data, the state of the page (kept in the hash of its address), and helpers that build elements.
// Names come from programs and policies: they become text nodes and never markup.

const data = JSON.parse(document.getElementById("data").textContent);
Object.assign(data, await unpack(document.getElementById("tables").textContent));
const SVG = "http://www.w3.org/2000/svg";
const GEMMS = ["fprop", "dgrad", "wgrad"];
const SIDES = ["before", "after"];
const byId = (id) => document.getElementById(id);

/** The object in a text: JSON, compressed, in base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

/** A text with its control and direction characters as escapes. */
function visible(text) {
  const hidden = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
  return String(text).replace(hidden, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === "") continue;
    element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** A button that copies a text. */
function copyButton(text, label) {
  return h("button", {
    type: "button", class: "copy", title: "Copy " + visible(text), "aria-label": "Copy " + visible(text),
    click: (event) => { event.stopPropagation(); copyText(text, event.currentTarget); },
  }, label || "copy");
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from disk may not use the clipboard: select the text of a field instead
    const field = h("textarea", { readonly: true });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = label; }, 900);
}

// ---- state

const DEFAULTS = {
  q: "", rule: "", format: "", product: "", overlay: "", changed: "", cell: "", brush: "", cls: "", scope: "0",
  open: "", view: "list",
};
const state = { ...DEFAULTS };
const listeners = [];

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(DEFAULTS)) state[key] = words.get(key) ?? DEFAULTS[key];
}

/** Changes the state, writes it to the address, and redraws what depends on it. */
function setState(changes) {
  Object.assign(state, changes);
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (value !== DEFAULTS[key]) words.set(key, value);
  history.replaceState(null, "", "#" + words);
  notify(Object.keys(changes));
}

function notify(keys) {
  for (const [watched, redraw] of listeners) if (watched.some((key) => keys.includes(key))) redraw();
}

const watch = (keys, redraw) => listeners.push([keys, redraw]);

// ---- numbers

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const TIMES = [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

/** Three digits that matter, and the largest unit that the rounded value reaches, else the smallest one. */
function withUnit(value, units) {
  const [size, unit] = units.find(([size]) => value >= 0.9995 * size) ?? units.at(-1);
  return (value / size).toPrecision(3) + " " + unit;
}

const withPrefix = (value, unit) => withUnit(value, PREFIXES) + unit;
const duration = (seconds) => withUnit(seconds, TIMES);

const count = (number, noun) => number.toLocaleString("en") + " " + noun + (number === 1 ? "" : "s");
