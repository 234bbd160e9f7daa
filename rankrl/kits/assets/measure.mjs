// Time the files of this kit in onnxruntime-web's WASM backend: npm install onnxruntime-web; node measure.mjs
//
// --threads N and --out FILE as for measure.py. Started again after an interruption it goes on where it stopped.

import { createHash } from "node:crypto";
import { existsSync, readFileSync, realpathSync, renameSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import os from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";

import { beginTable, measure, networkRows } from "./kit.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const option = (name, otherwise) => {
  const at = process.argv.indexOf(name);
  return at < 0 ? otherwise : process.argv[at + 1];
};
const leave = (message) => {
  console.error(message);
  process.exit(2);
};

let ort;
let version;
try {
  ort = await import("onnxruntime-web");
  const entry = createRequire(import.meta.url).resolve("onnxruntime-web");
  version = JSON.parse(readFileSync(join(dirname(entry), "..", "package.json"), "utf8")).version;
} catch (error) {
  leave(`onnxruntime-web cannot be loaded (${error.message}); run: npm install onnxruntime-web`);
}
const kit = JSON.parse(readFileSync(join(here, "kit.json"), "utf8"));
const threads = Number(option("--threads", kit.threads));
const out = option("--out", join(here, "times.json"));
await claim(out);
ort.env.wasm.numThreads = threads;
const machine = {
  processor: os.cpus()[0]?.model ?? process.arch,
  system: `${os.type()} ${os.release()}`,
  runtime: "onnxruntime-web (WASM)",
  version,
  node: process.versions.node,
  threads,
  clock: "wall",
};
let table;
try {
  table = beginTable(kit, machine, existsSync(out) ? JSON.parse(readFileSync(out, "utf8")) : null);
} catch (error) {
  leave(`${out}: ${error.message}`);
}
await measure(
  ort,
  kit,
  table,
  (path) => {
    const bytes = gunzipSync(readFileSync(join(here, path)));
    return new Uint8Array(bytes).slice(); // aligned, whatever buffer it lay in
  },
  (table, { done, files, minutes, failed }) => {
    writeFileSync(`${out}.tmp`, JSON.stringify(table, null, 1));
    renameSync(`${out}.tmp`, out);
    console.log(`${done} of ${files} files, about ${minutes.toFixed(1)} minutes left`);
    for (const [name, reason] of Object.entries(failed)) console.log(`  ${name} does not run here: ${reason}`);
  },
);
console.log(`${out}: all files are timed, ${Object.keys(table.failed).length} of them do not run here`);
if (kit.compare) {
  console.log("score, milliseconds, share of the first one's, largest difference of outputs:");
  for (const [title, ...numbers] of networkRows(kit, table)) console.log(`  ${title}: ${numbers.join(", ")}`);
}
process.exit(0);

/** Take the port of this machine that a measurement into this table alone holds, until it ends or is killed. */
function claim(path) {
  const whole = existsSync(path) ? realpathSync(path) : join(realpathSync(dirname(resolve(path))), basename(path));
  const port = 20000 + (createHash("sha256").update(whole).digest().readUInt32BE(0) % 10000);
  const taken = `${path} is written by another measurement (port ${port} of this machine is taken); wait for that, or name another file with --out`;
  return new Promise((taking) => {
    createServer()
      .on("error", () => leave(taken))
      .listen({ port, host: "127.0.0.1" }, taking);
  });
}
