// node writer.js HOST PORT TABLE COUNT: appends COUNT single steps; returns when the server has stored all of them.
import { Push, Subscriber } from "zeromq";
import { header, join, lz4Block, RECEIPT, SEGMENT, toBytes, unpack } from "./wire.js";

const [host, port, name, count] = process.argv.slice(2), RESEND_MS = 2000;
const welcome = await join(host, port, "writer", name), { run, schema, table } = welcome;
const stream = { run, sender: welcome.stream, incarnation: BigInt(`0x${welcome.incarnation}`) };
const experience = new Push(), receipts = new Subscriber();
experience.connect(`tcp://${host}:${welcome.experience}`);
receipts.connect(`tcp://${host}:${welcome.receipts}`);
receipts.subscribe(header(RECEIPT, { run, sender: stream.sender }, []).subarray(0, 20));

// A blob: offsets, then the entries of each step: compressed fields one by one, then all raw fields as one row.
function blob(steps) {
  const fields = Object.entries(table.steps), raw = fields.filter(([, field]) => field.codec === "raw");
  const entries = steps.flatMap((step) => [
    ...fields.filter(([, field]) => field.codec === "lz4").map(([key, field]) => lz4Block(toBytes(field, step[key]))),
    ...(raw.length ? [Buffer.concat(raw.map(([key, field]) => toBytes(field, step[key])))] : []),
  ]);
  const offsets = Buffer.alloc(4 * (entries.length + 1));
  let end = offsets.length;
  offsets.writeUInt32LE(end);
  entries.forEach((entry, i) => offsets.writeUInt32LE((end += entry.length), 4 * (i + 1)));
  return Buffer.concat([offsets, ...entries]);
}

// A record: the priority, the values, the number of the step.
function record(item, frame) {
  const values = Object.entries(table.values).map(([key, field]) => toBytes(field, item.values[key]));
  return Buffer.concat([toBytes({ dtype: "<f4" }, item.priority), ...values, toBytes({ dtype: "<u2" }, frame)]);
}

const window = new Map(); // segments that are not acknowledged, by number
function send(number, items) {
  const start = Buffer.alloc(16); // base: every lower segment is stored; version; group
  start.writeBigUInt64LE(window.size ? [...window.keys()][0] : number), start.writeUInt32LE(stream.sender, 12);
  const parts = [start, ...items.map(record), blob(items.map((item) => item.step))];
  const message = Buffer.concat([header(SEGMENT, { ...stream, schema, number, items: items.length }, parts), ...parts]);
  window.set(number, message);
  return experience.send(message);
}

let progress = Date.now(), store = null;
setInterval(async () => {
  if (Date.now() - progress < RESEND_MS) return;
  progress = Date.now();
  for (const message of window.values()) await experience.send(message);
}, 100).unref();
let room = () => {};
(async () => {
  for await (const parts of receipts) {
    const { incarnation: from, body } = unpack(parts), number = body.readBigUInt64LE(12); // One row: the stream's.
    if (body.readBigUInt64LE(4) !== stream.incarnation) continue;
    if (store !== null && store !== from) progress = 0; // Another memory: all again.
    store = from;
    for (const key of [...window.keys()].filter((key) => key < number)) window.delete(key), (progress = Date.now());
    room();
  }
})();

const item = (i) => ({
  priority: 1 + (i % 5),
  step: { image: Array.from({ length: 64 }, (_, at) => (i + at) % 251), x: [i / 2, -i, 0.25], number: i },
  values: { score: -i, mark: i / 4 },
});
for (let i = 0, number = 0n; i < count; number++) {
  const items = [];
  while (i < count && items.length < welcome.segment_length) items.push(item(i++));
  while (window.size >= welcome.window) await new Promise((done) => (room = done));
  await send(number, items);
}
while (window.size) await new Promise((done) => (room = done));
await welcome.close();
console.log(JSON.stringify({ stored: Number(count) }));
process.exit(0);
