// Messages of docs/protocol.md: the header, control messages, the fields of a table, LZ4 blocks.
import { createHash } from "node:crypto";
import { crc32 } from "node:zlib";
import { Dealer } from "zeromq";

export const SEGMENT = 1, RECEIPT = 2, BATCH = 3, PRIORITIES = 4, PARAMETERS = 5, CONTROL = 6, REQUEST = 8;
const HEADER_BYTES = 52, CRC_AT = 48;

// Returns the header of a message, which its first part begins with. `parts`: what follows the header.
export function header(kind, fields, parts) {
  const h = Buffer.alloc(HEADER_BYTES), body = Buffer.concat(parts);
  h.write("ApeX"), h.writeUInt8(6, 4), h.writeUInt8(kind, 5), h.writeUInt16LE(fields.shard ?? 0, 6);
  h.writeBigUInt64LE(fields.run ?? 0n, 8), h.writeUInt32LE(fields.sender ?? 0, 16);
  h.writeUInt32LE(fields.schema ?? 0, 20), h.writeBigUInt64LE(fields.incarnation ?? 0n, 24);
  h.writeBigUInt64LE(fields.number ?? 0n, 32), h.writeUInt32LE(fields.items ?? 0, 40), h.writeUInt32LE(body.length, 44);
  h.writeUInt32LE(crc32(body, crc32(h.subarray(0, CRC_AT))), CRC_AT);
  return h;
}

// Returns the header's fields and the rest of the first part; throws if the message is damaged.
export function unpack([first, ...more]) {
  const own = crc32(first.subarray(HEADER_BYTES), crc32(first.subarray(0, CRC_AT)));
  const right = more.reduce((sum, part) => crc32(part, sum), own) === first.readUInt32LE(CRC_AT);
  if (first.toString("latin1", 0, 4) !== "ApeX" || first[4] !== 6 || !right) throw new Error("not a message");
  return {
    kind: first[5], sender: first.readUInt32LE(16), incarnation: first.readBigUInt64LE(24),
    number: first.readBigUInt64LE(32), items: first.readUInt32LE(40), body: first.subarray(HEADER_BYTES),
  };
}

// Joins a server; returns its welcome, and keeps the lease until `close`.
export async function join(host, port, role, table) {
  const { send, greet, close: end } = control(`tcp://${host}:${port}`);
  const welcome = await greet({ type: "hello", role, table }), beats = setInterval(send, 1000, { type: "beat" });
  return { ...welcome, close: async () => (clearInterval(beats), await send({ type: "bye" }), end()) };
}

// Returns the functions of a control socket. `keys`: options of the socket for CURVE.
export function control(endpoint, keys = {}) {
  const socket = new Dealer({ receiveTimeout: 1000, linger: 1000, ...keys }), session = Math.floor(2 ** 50 * Math.random());
  socket.connect(endpoint);
  function send(message) {
    const json = Buffer.from(JSON.stringify({ ...message, session }));
    return socket.send(Buffer.concat([header(CONTROL, {}, [json]), json]));
  }
  const receive = () => socket.receive().then((parts) => JSON.parse(unpack(parts).body), () => null);
  async function greet(hello, isWhole = () => true) {
    for (;;) {
      await send(hello);
      const answer = await receive();
      if (answer?.type === "refused") throw new Error(`${answer.reason} ${answer.subject ?? ""}`);
      if (answer?.stop) return null; // The run is over.
      if (answer?.type === "welcome" && isWhole(answer)) return { ...answer, ...identify(answer) };
      if (answer) await new Promise((done) => setTimeout(done, 200)); // Later.
    }
  }
  return { send, receive, greet, close: () => socket.close() };
}

// Returns the run id and the hash of the table in a welcome, as headers have them.
function identify({ run_id, table }) {
  const escaped = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
  const text = JSON.stringify(table).replace(/[\x7f-\uffff]/g, escaped);
  return { run: BigInt(`0x${run_id}`), schema: createHash("sha256").update(text).digest().readUInt32LE(0) };
}

const ARRAYS = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array,
  i4: Int32Array, u8: BigUint64Array, i8: BigInt64Array, f4: Float32Array, f8: Float64Array };

// Returns the bytes of a field's values, and the values of its bytes, on a little-endian processor.
export function toBytes({ dtype }, values) {
  const convert = dtype.endsWith("i8") || dtype.endsWith("u8") ? BigInt : Number;
  return Buffer.from(ARRAYS[dtype.slice(1)].from([values].flat(Infinity), convert).buffer);
}
export const numBytes = ({ dtype, shape }) => shape.reduce((product, n) => product * n, Number(dtype.slice(2)));
export const fromBytes = ({ dtype }, bytes) => Array.from(new (ARRAYS[dtype.slice(1)])(Uint8Array.from(bytes).buffer));

// Returns an LZ4 block of literals only, which is valid, and larger than a compressed one.
export function lz4Block(bytes) {
  if (bytes.length < 15) return Buffer.concat([Buffer.from([bytes.length << 4]), bytes]);
  const rest = bytes.length - 15, length = [Buffer.alloc(Math.floor(rest / 255), 255), Buffer.from([rest % 255])];
  return Buffer.concat([Buffer.from([0xf0]), ...length, bytes]);
}

// Returns the `size` bytes of an LZ4 block.
export function lz4Decode(block, size) {
  let out = Buffer.alloc(size), from = 0, to = 0;
  const length = (nibble) => {
    if (nibble === 15) { let more; do nibble += more = block[from++]; while (more === 255); }
    return nibble;
  };
  while (from < block.length) {
    const token = block[from++], literals = length(token >> 4);
    to += block.copy(out, to, from, from + literals), from += literals;
    if (from >= block.length) break;
    const back = block.readUInt16LE((from += 2) - 2);
    for (let left = length(token & 15) + 4; left > 0; left--) out[to] = out[to++ - back];
  }
  return out;
}
