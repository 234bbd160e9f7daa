// What measure.mjs (node) and index.html (browsers) have in common: timing a kit's files in onnxruntime-web.

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: Uint16Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};
const STEPS = 50; // clocks of browsers move in steps of up to 0.1 ms: passes are repeated for so many of them

/** Return the table to go on with: `begun` if it is of this kit and device, else a new one. */
export function beginTable(kit, machine, begun) {
  const total = kit.groups.reduce((sum, group) => sum + group.files.length, 0);
  const head = { version: kit.version, kit: kit.digest, about: kit.about, machine };
  if (!begun) return { ...head, networks: kit.networks, left: total, times: {}, failed: {} };
  for (const [name, value] of Object.entries(head)) {
    if (JSON.stringify(begun[name]) !== JSON.stringify(value)) {
      throw new Error(`the table was begun with another ${name} (${JSON.stringify(begun[name])}); move it away`);
    }
  }
  return begun;
}

/** Time all groups that the table lacks; `read(path)` returns bytes, `save(table, progress)` keeps the table. */
export async function measure(ort, kit, table, read, save) {
  const known = (name) => name in table.times || name in table.failed;
  const todo = kit.groups.filter((group) => !group.files.every(known));
  const files = todo.reduce((sum, group) => sum + group.files.length, 0);
  const start = performance.now();
  let done = 0;
  for (const group of todo) {
    const { times, failed } = await timed(ort, group, read, kit.compare);
    Object.assign(table.times, times);
    Object.assign(table.failed, failed);
    table.left = kit.groups.flatMap((each) => each.files).filter((name) => !known(name)).length;
    done += group.files.length;
    const minutes = ((performance.now() - start) / done) * (files - done) / 60000;
    await save(table, { done, files, minutes, failed });
  }
  return table;
}

/** Load onnxruntime-web in a browser: installed with npm in this folder, or its two files put beside this one. */
export async function loadRuntime() {
  const file = "ort.wasm.bundle.min.mjs";
  for (const folder of ["./node_modules/onnxruntime-web/dist/", "./"]) {
    try {
      return await import(new URL(folder + file, import.meta.url));
    } catch {
      continue;
    }
  }
  throw new Error(
    `onnxruntime-web is not here: run "npm install onnxruntime-web" in this folder, or put ${file} and ` +
      "ort-wasm-simd-threaded.wasm (of the package's dist folder) beside this page",
  );
}

/** Return the bytes of a file beside this one, unpacked. */
export async function readFile(path) {
  const answer = await fetch(new URL(path, import.meta.url));
  if (!answer.ok) throw new Error(`${path} cannot be read (${answer.status})`);
  const stream = path.endsWith(".gz") ? answer.body.pipeThrough(new DecompressionStream("gzip")) : answer.body;
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Open a file; onnxruntime-web computes with `ort.env.wasm.numThreads` threads. */
export function open(ort, model) {
  return ort.InferenceSession.create(model, { executionProviders: ["wasm"], logSeverityLevel: 3 });
}

/** Return the inputs of a group as tensors. */
export async function tensors(ort, inputs, read) {
  const feeds = {};
  for (const { name, file, dtype, shape } of inputs) {
    const bytes = await read(file);
    const data = new ARRAYS[dtype](bytes.buffer, bytes.byteOffset, bytes.byteLength / ARRAYS[dtype].BYTES_PER_ELEMENT);
    feeds[name] = new ort.Tensor(dtype, data, shape);
  }
  return feeds;
}

/** Return how long passes are repeated at least, in milliseconds. */
function leastMs() {
  const steps = Array.from({ length: 20 }, () => {
    const start = performance.now();
    let now = start;
    while (now === start) now = performance.now();
    return now - start;
  });
  return Math.max(1, STEPS * median(steps));
}

async function timed(ort, group, read, compare) {
  const least = leastMs();
  const feeds = await tensors(ort, group.inputs, read);
  const sessions = new Map();
  const repeats = new Map();
  const outputs = new Map();
  const failed = {};
  for (const name of group.files) {
    let session;
    try {
      session = await open(ort, await read(`models/${name}.onnx.gz`));
      const answers = await session.run(feeds);
      if (compare) outputs.set(name, answers[session.outputNames[0]].data.slice());
      const start = performance.now();
      for (let pass = 0; pass < Math.max(1, group.warm_up - 1); pass++) await session.run(feeds);
      const each = (performance.now() - start) / Math.max(1, group.warm_up - 1);
      sessions.set(name, session);
      repeats.set(name, each > least ? 1 : Math.ceil(least / Math.max(each, 0.01)));
    } catch (error) {
      // The kit never stops at one file.
      failed[name] = String(error?.message ?? error).split(/\s+/).join(" ").slice(0, 300);
      await session?.release();
    }
  }
  const passes = new Map([...sessions.keys()].map((name) => [name, []]));
  for (let turn = 0; turn < group.runs; turn++) {
    const order = [...sessions.keys()];
    if (turn % 2) order.reverse();
    for (const name of order) {
      const session = sessions.get(name);
      const count = repeats.get(name);
      await session.run(feeds); // other files have pushed its tensors out of the cache
      const start = performance.now();
      for (let pass = 0; pass < count; pass++) await session.run(feeds);
      passes.get(name).push(Math.max(performance.now() - start, 1e-3) / count);
    }
  }
  for (const session of sessions.values()) await session.release();
  const times = {};
  for (const [name, each] of passes) times[name] = { median_ms: median(each), minimum_ms: Math.min(...each) };
  const original = outputs.get(group.files[0]);
  for (const [name, each] of outputs) {
    if (original) times[name].difference = largestDifference(each, original);
  }
  return { times, failed };
}

function largestDifference(some, others) {
  let largest = 0;
  for (let index = 0; index < some.length; index++) {
    largest = Math.max(largest, Math.abs(Number(some[index]) - Number(others[index])));
  }
  return largest;
}

/** Return the rows of a table of whole networks: title, score, milliseconds, share of the first, difference. */
export function networkRows(kit, table) {
  const first = table.times[kit.networks[0]?.file]?.minimum_ms;
  return kit.networks.map(({ file, title, score }) => {
    const known = table.times[file];
    return [
      title,
      score === null ? "" : score.toFixed(4),
      known ? known.minimum_ms.toPrecision(3) : file in table.failed ? "does not run" : "",
      known && first ? (known.minimum_ms / first).toFixed(3) : "",
      known?.difference === undefined ? "" : known.difference.toPrecision(2),
    ];
  });
}

/** Return the median of numbers. */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
