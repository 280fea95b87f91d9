"use strict";
// The page of the playground. Python, in Pyodide, lints and plans: policyc/editor/playground.py.

const MODELS = {
  llama3_8b: "Llama 3 8B", llama3_405b: "Llama 3.1 405B", mixtral_8x7b: "Mixtral 8x7B", vit_b16: "ViT-B/16",
};
const FIRST = "llama_nvfp4";
const PAUSE = 120; // milliseconds without a key before the policy is checked
const $ = (id) => document.getElementById(id);
let python, words, result, timer;

// ---- the link: model, variant and text after the '#'

function encode(text) {
  const bytes = Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte));
  return btoa(bytes.join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function decode(text) {
  const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return new TextDecoder().decode(Uint8Array.from(bytes, (c) => c.charCodeAt(0)));
}

function readHash() {
  const values = new URLSearchParams(location.hash.slice(1));
  try {
    return { model: values.get("model"), variant: values.get("variant") ?? "", text: values.has("policy") ? decode(values.get("policy")) : null };
  } catch {
    return { model: null, variant: "", text: null }; // a link that was cut
  }
}

function writeHash() {
  const values = new URLSearchParams({ model: $("model").value, policy: encode($("text").value) });
  if ($("variant").value) values.set("variant", $("variant").value);
  history.replaceState(null, "", `#${values}`);
}

// ---- the editor: a transparent text area over the colored text

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function wordClass(token) {
  if (token.startsWith("#")) return "comment";
  if (/^["']/.test(token)) return "string";
  if (/^[0-9]/.test(token)) return "number";
  return Object.keys(words).find((kind) => words[kind].has(token)) ?? "";
}

function paint() {
  const text = $("text").value;
  const marks = (result?.text === text ? result.diagnostics : []).filter((d) => d.end > d.start);
  const hints = new Map((result?.text === text && result.plan ? result.plan.rules : []).map((r) => [r.end, r]));
  const cuts = new Set([0, text.length, ...marks.flatMap((d) => [d.start, d.end]), ...hints.keys()]);
  const kinds = [];
  for (const match of text.matchAll(/#[^\n]*|"[^"\n]*"|'[^'\n]*'|[\p{L}_][\p{L}\p{N}_]*|[0-9][\w.%]*/gu)) {
    let kind = words ? wordClass(match[0]) : "";
    if (kind === "kind" && !/\bwhere\b[^\n]*$/.test(text.slice(Math.max(0, match.index - 200), match.index))) kind = ""; // a scope
    if (kind) { kinds.push([match.index, match.index + match[0].length, kind]); cuts.add(match.index).add(match.index + match[0].length); }
  }
  const places = [...cuts].sort((a, b) => a - b);
  const pieces = [];
  let at = 0;
  places.forEach((start, number) => {
    if (hints.has(start)) pieces.push(element("span", "hint", hintText(text, start, hints.get(start))));
    const end = places[number + 1];
    if (end === undefined) return;
    while (at < kinds.length && kinds[at][1] <= start) at += 1;
    const kind = at < kinds.length && kinds[at][0] <= start ? kinds[at][2] : "";
    const mark = marks.find((d) => d.start <= start && end <= d.end);
    pieces.push(element("span", [kind, mark ? `squiggle ${mark.severity}` : ""].join(" ").trim(), text.slice(start, end)));
  });
  $("colors").replaceChildren(...pieces, "\n");
  scroll();
}

// A hint must not move what is typed: it stands only where nothing but a line break follows.
function hintText(text, end, rule) {
  if (end < text.length && text[end] !== "\n") return "";
  const sites = rule.decided === rule.matched ? `${rule.decided}` : `${rule.decided} of ${rule.matched}`;
  return `   ${sites} sites, ${percent(rule.flops)}`;
}

function scroll() {
  $("colors").scrollTop = $("text").scrollTop;
  $("colors").scrollLeft = $("text").scrollLeft;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// ---- findings

function applyFix(fix) {
  let text = $("text").value;
  if (text !== result.text) return; // the fix is of an earlier text: the findings of this one are on their way
  for (const [start, end, replacement] of [...fix.edits].sort((a, b) => b[0] - a[0])) {
    text = text.slice(0, start) + replacement + text.slice(end);
  }
  $("text").value = text;
  $("example").value = "";
  update();
}

function showFindings() {
  const items = result.diagnostics.map((finding) => {
    const item = element("li", finding.severity);
    item.append(`${finding.line}: `, element("span", "code", finding.code), ` ${finding.message}`);
    item.title = finding.title;
    if (finding.help) item.append(element("div", "help", finding.help));
    if (finding.fix) {
      const button = element("button", "", `Fix: ${finding.fix.message}`);
      if (!finding.fix.safe) button.title = "This changes what the policy means.";
      button.addEventListener("click", (event) => { event.stopPropagation(); applyFix(finding.fix); });
      item.append(button);
    }
    item.addEventListener("click", () => { $("text").focus(); $("text").setSelectionRange(finding.start, finding.end); });
    return item;
  });
  $("findings").replaceChildren(...(items.length ? items : [element("li", "clean", "No findings.")]));
}

// ---- the heat map

function showPlan() {
  const plan = result.plan;
  $("right").classList.toggle("stale", !plan);
  if (!plan) {
    if (!$("map").hasChildNodes()) $("summary").textContent = "The map appears when the policy has no errors.";
    return;
  }
  const low = Object.entries(plan.formats).filter(([format]) => /4|8/.test(format));
  const share = low.reduce((sum, [, value]) => sum + value, 0);
  $("summary").replaceChildren(element("b", "", percent(share)), ` of the FLOPs of a step of ${MODELS[$("model").value]} run in 8 bits or fewer.`);
  $("bar").replaceChildren(...Object.entries(plan.formats).map(([format, value]) => {
    const part = element("div");
    part.style.cssText = `width:${100 * value}%;background:var(--${format})`;
    return part;
  }));
  $("bar").setAttribute("aria-label", Object.entries(plan.formats).map(([f, v]) => `${f} ${percent(v)}`).join(", "));
  $("legend").replaceChildren(...Object.entries(plan.formats).map(([format, value]) => {
    const entry = element("span");
    const color = element("i");
    color.style.background = `var(--${format})`;
    entry.append(color, `${format} ${percent(value)}`);
    return entry;
  }), element("span", "", "lines of a row: fprop, dgrad, wgrad; columns: layers"));
  $("map").replaceChildren(...plan.rows.map(showRow));
}

function showRow(row) {
  const made = element("div", "row");
  const name = element("div", "name");
  name.append(element("bdi", "", row.name), element("small", "", `${row.kind || "no kind"}, ${row.size}`));
  name.title = row.name;
  const cells = element("div", "cells");
  for (const [product, runs] of Object.entries(row.products)) {
    const line = element("div", "product-line");
    for (const run of runs) {
      const cell = element("div", "cell");
      const width = 100 / row.columns;
      cell.style.cssText = `left:${run.first * width}%;width:${(run.last - run.first + 1) * width}%;background:var(--${run.format})`;
      const layers = row.columns === 1 ? "" : run.first === run.last ? `, layer ${run.first}` : `, layers ${run.first}-${run.last}`;
      cell.dataset.format = run.format;
      cell.addEventListener("mouseenter", () => { $("detail").textContent = `${row.name}, ${product}${layers}: ${run.text}\n${run.rule}`; });
      line.append(cell);
    }
    cells.append(line);
  }
  made.append(name, element("div", "share", percent(row.share)), cells);
  return made;
}

function setOptions(id, names, chosen) {
  $(id).replaceChildren(...names.map(([value, label]) => new Option(label, value, false, value === chosen)));
  const label = $(`${id}-label`);
  if (label) label.hidden = names.length < 2;
}

// ---- checking

async function update() {
  const text = $("text").value;
  if (!python) return paint();
  const json = python.run(text, $("model").value, $("variant").value, Number($("phase").value || 0));
  result = { ...JSON.parse(json), text };
  setOptions("variant", [["", "none"], ...result.variants.map((v) => [v, v])], $("variant").value);
  if (result.plan) setOptions("phase", result.plan.phases.map((label, number) => [String(number), label]), String(result.plan.phase));
  paint();
  showFindings();
  showPlan();
  writeHash();
  document.body.dataset.checked = String(Number(document.body.dataset.checked ?? 0) + 1);
}

function updateSoon() {
  $("example").value = "";
  paint();
  clearTimeout(timer);
  timer = setTimeout(update, PAUSE);
}

async function fetchBytes(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.arrayBuffer();
}

async function startPython() {
  if (location.protocol === "file:") throw new Error("open this page through a web server: python -m http.server -d build/docs");
  const { loadPyodide } = await import("./pyodide/pyodide.mjs").catch(() => { throw new Error("Python is not here: 'make playground' builds it"); });
  const [pyodide, archive, ...lists] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", location.href).href }), fetchBytes("policyc.zip"),
    ...Object.keys(MODELS).map((name) => fetchBytes(`sites/${name}.json`)),
  ]);
  pyodide.unpackArchive(archive, "zip", { extractDir: "/policyc" });
  pyodide.globals.set("site_lists", pyodide.toPy(Object.fromEntries(Object.keys(MODELS).map((name, i) => [name, new TextDecoder().decode(lists[i])]))));
  pyodide.runPython(`
import json, sys
sys.path.insert(0, "/policyc")
from policyc.compiler.tables.plan_json import parse_sites
from policyc.editor import playground
sites = {name: parse_sites(text) for name, text in site_lists.items()}
def run(text, model, variant, phase):
    return json.dumps(playground.check(text, sites[model], variant, phase))
start = json.dumps({"words": playground.list_words(), "examples": playground.list_examples()})
`);
  const start = JSON.parse(pyodide.globals.get("start"));
  words = Object.fromEntries(Object.entries(start.words).map(([kind, list]) => [kind, new Set(list)]));
  python = { run: pyodide.globals.get("run") };
  return start.examples;
}

async function main() {
  const linked = readHash();
  setOptions("model", Object.entries(MODELS), linked.model in MODELS ? linked.model : "llama3_8b");
  $("text").addEventListener("input", updateSoon);
  $("text").addEventListener("scroll", scroll);
  window.addEventListener("hashchange", () => location.reload()); // another link was opened in this tab
  for (const id of ["model", "variant", "phase"]) $(id).addEventListener("change", update);
  $("share").addEventListener("click", async () => {
    writeHash();
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    $("status").textContent = "the link is in the address bar and copied";
  });
  if (linked.text !== null) $("text").value = linked.text;
  paint();
  try {
    const examples = await startPython();
    setOptions("example", [["", "bundled…"], ...Object.keys(examples).map((name) => [name, name])], "");
    $("example").addEventListener("change", () => {
      if (!$("example").value) return;
      $("text").value = examples[$("example").value];
      $("variant").value = "";
      update();
    });
    if (linked.text === null && !$("text").value) $("text").value = examples[FIRST];
    setOptions("variant", [["", "none"], ...(linked.variant ? [[linked.variant, linked.variant]] : [])], linked.variant);
    $("status").textContent = "";
    await update();
  } catch (error) {
    $("status").textContent = document.body.dataset.failed = error.message;
    throw error;
  }
}

main();
