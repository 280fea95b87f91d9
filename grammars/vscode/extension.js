"use strict";
// Starts the language server of policyc, and stops it with the editor.
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

async function activate() {
  const [command, ...args] = vscode.workspace.getConfiguration("policyc").get("command");
  const documents = [{ language: "policy" }];
  client = new LanguageClient("policyc", "policyc", { command, args }, { documentSelector: documents });
  try {
    await client.start();
  } catch (error) {
    const remedy = "pip install policyc, or set policyc.command to the path of policyc";
    vscode.window.showErrorMessage(`policyc: '${command}' did not start (${error.message}): ${remedy}`);
  }
}

function deactivate() {
  return client && client.isRunning() ? client.stop() : undefined;
}

module.exports = { activate, deactivate };
