"use strict";
// Tokenizes a policy as VS Code does, and checks the scopes of its words. `make vscode` runs it.
const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");
const oniguruma = require("vscode-oniguruma");
const { Registry, parseRawGrammar, INITIAL } = require("vscode-textmate");

const CASES = {
  "recipe nv = nvfp4(rht=wgrad, rht_size=32)  # recipe": [
    ["recipe", "keyword.control"], ["nv", "entity.name.function"], ["nvfp4", "support.type"], ["rht", "variable.parameter"],
    ["wgrad", "constant.language"], ["17/16", "constant.numeric"], ["# recipe", "comment.line"],
  ],
  "{q,k}_proj.recipe @ bwd where mlp and k % 16 != 0 -> nv expect 96": [
    ["recipe", "variable.other"], ["bwd", "constant.language"], ["where", "keyword.other"], ["mlp", "support.constant"],
    ["and", "keyword.operator.logical"], ["->", "keyword.operator.arrow"], ["nv", "variable.other"], ["expect", "keyword.other"],
  ],
  "layers[-15%:].recipe.* -> split(fprop=bf16)": [
    ["-15%", "constant.numeric"], ["recipe", "variable.other"], ["split", "support.type"], ["bf16", "support.type"],
  ],
  "recipe.up -> keep": [["recipe", "variable.other"], ["keep", "support.type"]],
  'after 82% { import "x.policy" }': [["after", "keyword.control"], ["82%", "constant.numeric"], ['"x.policy"', "string.quoted"]],
};

async function main() {
  const wasm = fs.readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm"));
  await oniguruma.loadWASM(wasm.buffer.slice(wasm.byteOffset, wasm.byteOffset + wasm.byteLength));
  const file = path.join(__dirname, "syntaxes", "policy.tmLanguage.json");
  const registry = new Registry({
    onigLib: Promise.resolve({
      createOnigScanner: (patterns) => new oniguruma.OnigScanner(patterns),
      createOnigString: (text) => new oniguruma.OnigString(text),
    }),
    loadGrammar: async () => parseRawGrammar(fs.readFileSync(file, "utf8"), file),
  });
  const grammar = await registry.loadGrammar("source.policy");
  for (const [line, expected] of Object.entries(CASES)) {
    const tokens = grammar.tokenizeLine(line, INITIAL).tokens.map((token) => [
      line.slice(token.startIndex, token.endIndex), token.scopes.at(-1),
    ]);
    let next = 0;
    for (const [text, scope] of expected) {
      const found = tokens.findIndex(([t], index) => index >= next && t === text);
      assert.ok(found >= 0, `'${text}' is no token of: ${line}\n${JSON.stringify(tokens)}`);
      assert.equal(tokens[found][1], scope.startsWith("comment") ? "comment.line.number-sign.policy" : `${scope}.policy`, `'${text}' in: ${line}`.concat(` ${JSON.stringify(tokens)}`));
      next = found + 1;
    }
  }
  console.log(`${Object.keys(CASES).length} lines have the expected colors`);
}

main();
