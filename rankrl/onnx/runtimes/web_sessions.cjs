// Runs ONNX files in onnxruntime-web for `onnxruntime_web.py`: commands come as lines of JSON, arrays as bytes
// behind them; answers go back alike. Arguments: the package's path, and the number of threads.

const [package_, threads] = process.argv.slice(2);
const ort = require(package_);
ort.env.wasm.numThreads = Number(threads);

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int32: Int32Array,
  int64: BigInt64Array,
  bool: Uint8Array,
};
const sessions = new Map();

const commands = {
  async open({ id, path }) {
    const session = await ort.InferenceSession.create(path, { executionProviders: ["wasm"], logSeverityLevel: 3 });
    sessions.set(id, { session, feeds: {}, outputs: {} });
    return [{ inputs: session.inputMetadata }];
  },
  async feed({ id, arrays }, bytes) {
    let start = 0;
    const feeds = {};
    for (const { name, dtype, shape, size } of arrays) {
      const part = new Uint8Array(bytes.subarray(start, start + size)); // a copy, aligned
      feeds[name] = new ort.Tensor(dtype, new ARRAYS[dtype](part.buffer), shape);
      start += size;
    }
    sessions.get(id).feeds = feeds;
    return [{}];
  },
  async run({ id }) {
    const entry = sessions.get(id);
    entry.outputs = await entry.session.run(entry.feeds);
    return [{}];
  },
  async fetch({ id }) {
    const { session, outputs } = sessions.get(id);
    const tensors = session.outputNames.map((name) => outputs[name]);
    const parts = tensors.map(({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    const arrays = tensors.map(({ type, dims }, index) => ({ dtype: type, shape: dims, size: parts[index].length }));
    return [{ arrays }, ...parts];
  },
  async close({ id }) {
    await sessions.get(id)?.session.release();
    sessions.delete(id);
    return [{}];
  },
};

async function answer(command, bytes) {
  let parts;
  try {
    parts = await commands[command.do](command, bytes);
  } catch (error) {
    parts = [{ error: String(error?.message ?? error) }];
  }
  process.stdout.write(`${JSON.stringify(parts[0])}\n`);
  for (const part of parts.slice(1)) process.stdout.write(part);
}

let waiting = Buffer.alloc(0);
let command = null;
let busy = Promise.resolve();
process.stdin.on("data", (chunk) => {
  waiting = waiting.length ? Buffer.concat([waiting, chunk]) : chunk;
  for (;;) {
    if (command === null) {
      const end = waiting.indexOf(10);
      if (end < 0) return;
      command = JSON.parse(waiting.subarray(0, end).toString());
      waiting = waiting.subarray(end + 1);
    }
    const size = (command.arrays ?? []).reduce((sum, array) => sum + array.size, 0);
    if (waiting.length < size) return;
    const [taken, bytes] = [command, waiting.subarray(0, size)];
    waiting = waiting.subarray(size);
    command = null;
    busy = busy.then(() => answer(taken, bytes));
  }
});
process.stdin.on("end", () => busy.then(() => process.exit(0)));
