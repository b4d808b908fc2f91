// Ask the built site's own search worker, as a browser would, without a browser.
//
// usage: node tools/docsite/search.js SITE < terms (JSON list)        prints {term: [address of a page, best first]}
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const folder = path.join(site, "assets", "javascripts", "workers");
const file = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));

let receive;
let answer;
const scope = {
  console,
  setTimeout,
  addEventListener: (_, listener) => (receive = listener),
  postMessage: (message) => answer(message),
};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(path.join(folder, file), "utf8"), scope);

function ask(message) {
  return new Promise((resolve) => {
    answer = resolve;
    receive({ data: message });
  });
}

async function main() {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: false } } });
  const found = {};
  for (const term of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const reply = await ask({ type: 2, data: term });
    found[term] = reply.data.items.map((sections) => sections[0].location.split("#")[0]);
    // A page's own entry carries its score even where a section of it scores higher: Material orders by the first of a page.
  }
  process.stdout.write(JSON.stringify(found));
}

main();
