// node sampler.js HOST PORT TABLE BATCH COUNT: draws COUNT batches, prints their items, and doubles each priority.
import { Dealer, Push } from "zeromq";
import { fromBytes, header, join, lz4Decode, numBytes, PRIORITIES, REQUEST, toBytes, unpack } from "./wire.js";

const [host, port, name, batch, count] = process.argv.slice(2);
const welcome = await join(host, port, "sampler", name), { run, schema, table } = welcome;
const batches = new Dealer(), priorities = new Push({ linger: 1000 });
welcome.batches.forEach((each) => batches.connect(`tcp://${host}:${each}`));
priorities.connect(`tcp://${host}:${welcome.priorities}`);
const request = () => batches.send(header(REQUEST, { run, schema, items: Number(batch) }, []));

// A batch's record: key, probability, the values that are not kept, version, steps, reference; padded to 8 bytes.
const RECORD = [
  ["key", { dtype: "<i8", shape: [] }], ["probability", { dtype: "<f8", shape: [] }],
  ...Object.entries(table.values).filter(([key]) => !table.kept.includes(key)),
  ["version", { dtype: "<u4", shape: [] }],
  ...["num_frames", "frame"].map((key) => [key, { dtype: "<u2", shape: [] }]),
];
const RECORD_BYTES = Math.ceil(RECORD.reduce((sum, [, field]) => sum + numBytes(field), 0) / 8) * 8;

// Returns the fields that stand one after the other in `bytes`.
function read(fields, bytes) {
  let at = 0;
  const next = (field) => fromBytes(field, bytes.subarray(at, (at += numBytes(field))));
  return Object.fromEntries(fields.map(([key, field]) => [key, next(field)]));
}

const lz4 = Object.entries(table.steps).filter(([, field]) => field.codec === "lz4");
const raw = Object.entries(table.steps).filter(([, field]) => field.codec === "raw");
const entries = lz4.length + (raw.length ? 1 : 0); // of a step

function readItem(records, blob, index) {
  const item = read(RECORD, records.subarray(RECORD_BYTES * index, RECORD_BYTES * (index + 1)));
  const offset = (i) => blob.readUInt32LE(4 * (index * entries + i));
  const entry = (i) => blob.subarray(offset(i), offset(i + 1));
  lz4.forEach(([key, field], i) => (item[key] = fromBytes(field, lz4Decode(entry(i), numBytes(field)))));
  return Object.assign(item, raw.length ? read(raw, entry(lz4.length)) : {});
}

const integers = (key, value) => (typeof value === "bigint" ? Number(value) : value);
for (let i = 0; i < count; ) {
  const parts = await batches.receive();
  if (parts[0].length === 0) { // A sampler process greets a new connection: nothing waits there.
    await request(), await request(); // One waits at the server while the other batch is read.
    continue;
  }
  i++;
  await request();
  const message = unpack(parts);
  const records = message.body.subarray(8); // The first 8 bytes are the number of items in the table.
  const items = Array.from({ length: message.items }, (_, index) => readItem(records, parts[1], index));
  console.log(JSON.stringify({ size: Number(message.body.readBigUInt64LE(0)), items }, integers));
  const keys = items.map((item) => item.key[0]), doubled = items.map((item) => 2 * (1 + (Number(item.number[0]) % 5)));
  const body = [toBytes({ dtype: "<i8" }, keys), toBytes({ dtype: "<f4" }, doubled)];
  const fields = { run, schema, ...message, items: keys.length }; // Sender, incarnation and number are the batch's.
  await priorities.send(Buffer.concat([header(PRIORITIES, fields, body), ...body]));
}
await new Promise((done) => setTimeout(done, 500)); // The last priorities are on their way.
await welcome.close();
process.exit(0);
