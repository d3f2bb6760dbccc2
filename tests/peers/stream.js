// Streams of CartPole: epsilon-greedy actions, n-step transitions, segments.
import { CartPole } from "./cartpole.js";
import { header, RECEIPT, SEGMENT, toBytes } from "./wire.js";

const RESEND_MS = 2000;

// A segment of the first rows. A row has one step: observation, q, action, end, and last if it ended.
function segment(rows, length, span, gamma) {
  const frames = [], first = [], items = [];
  for (const row of rows) {
    first.push(frames.push(row.observation) - 1);
    if (row.end) frames.push(row.last);
  }
  for (let i = 0; i < length; i++) {
    let m = 1, sum = 1;
    while (m < span && !rows[i + m - 1].end) sum += gamma ** m++;
    const { end, lastQ } = rows[i + m - 1], nextQ = lastQ ?? rows[i + m]?.q;
    const discount = end === "terminated" ? 0 : gamma ** m, { q, action } = rows[i];
    const priority = Math.abs(sum + (discount ? discount * Math.max(...nextQ) : 0) - q[action]);
    const floats = [priority, sum, discount, 1, rows[i].end === "terminated" ? 0 : gamma];
    const bytes = [["<f4", floats], ["<i8", action], ["<u2", [first[i], first[i] + m]], ["|u1", [1, 1]]];
    items.push(...bytes.map(([dtype, values]) => toBytes({ dtype }, values)));
  }
  const offsets = frames.map((_, i) => 4 * (frames.length + 1) + 16 * i);
  const table = toBytes({ dtype: "<u4" }, [...offsets, 4 * (frames.length + 1) + 16 * frames.length]);
  return [...items, table, ...frames.map((frame) => toBytes({ dtype: "<f4" }, [...frame]))];
}

// Returns the receipts in a message: of each stream the id, incarnation, first missing number and bitmap.
export function receiptsOf({ incarnation: store, items, body }) {
  return Array.from({ length: items }, (_, i) => body.subarray(28 * i)).map((row) => ({
    store, sender: row.readUInt32LE(0), incarnation: row.readBigUInt64LE(4),
    number: row.readBigUInt64LE(12), bitmap: row.readBigUInt64LE(20),
  }));
}

// A stream of CartPole, whose segments are sent until the replay server has stored them.
export class Stream {
  constructor([id, incarnation], { run, schema: hash, span, actor, network, pushes, receipts }) {
    const shard = id % pushes.length, share = actor.num_actors > 1 ? id / (actor.num_actors - 1) : 0.5;
    this.epsilon = actor.epsilon_base ** (1 + actor.epsilon_exponent * share);
    Object.assign(this, { actor, network, span, games: 0, score: 0, steps: 0 });
    this.fields = { run, schema: hash, shard, sender: id, incarnation: BigInt(`0x${incarnation}`) };
    this.push = pushes[shard], this.window = new Map(), this.next = 0, this.rows = [];
    this.game = new CartPole(), this.observation = this.game.reset(), this.progress = Date.now();
    receipts.subscribe(header(RECEIPT, { ...this.fields, schema: 0 }, []).subarray(0, 20));
  }
  get base() { return Math.min(this.next, ...this.window.keys()); }
  get full() { return this.next - this.base >= this.actor.window; }
  step() {
    const values = this.network.q(this.observation), random = Math.random() < this.epsilon;
    const action = random ? Math.floor(2 * Math.random()) : values[1] > values[0] ? 1 : 0;
    const { observation, terminated, truncated } = this.game.step(action);
    const row = { observation: this.observation, q: values, action, last: observation };
    this.rows.push(row), this.steps++;
    row.end = terminated ? "terminated" : truncated && "truncated";
    if (row.end) {
      row.lastQ = this.network.q(observation);
      this.games++, this.score += this.game.length;
    }
    this.observation = row.end ? this.game.reset() : observation;
    const { segment_length: items, gamma } = this.actor;
    if (this.rows.length < items + this.span) return;
    const start = Buffer.alloc(16);
    start.writeBigUInt64LE(BigInt(this.base)), start.writeUInt32LE(this.network.version, 8);
    start.writeUInt32LE(this.fields.sender, 12); // Each stream is a group of its own.
    const parts = [start, ...segment(this.rows, items, this.span, gamma)];
    const number = this.next++, fields = { ...this.fields, number: BigInt(number), items };
    if (!this.window.size) this.progress = Date.now();
    this.window.set(number, Buffer.concat([header(SEGMENT, fields, parts), ...parts]));
    this.rows.splice(0, items);
    return this.push.send(this.window.get(number));
  }

  // Returns the games since the last call as in the scores of a heartbeat.
  take() {
    const { games, score } = this;
    this.games = this.score = 0;
    return games ? [[this.fields.sender, games, score, score]] : [];
  }

  // Takes a receipt.
  acknowledge({ store, incarnation, number, bitmap }) {
    const sent = this.window.size;
    if (incarnation !== this.fields.incarnation) return;
    for (const key of this.window.keys()) {
      const after = BigInt(key) - number;
      if (after < 0n || (after > 0n && (bitmap >> (after - 1n)) & 1n)) this.window.delete(key);
    }
    if (this.window.size < sent) this.progress = Date.now();
    if (this.store !== undefined && this.store !== store) this.progress = 0; // A new memory.
    this.store = store;
  }
  async resend() {
    if (!this.window.size || Date.now() - this.progress < RESEND_MS) return;
    this.progress = Date.now();
    for (const message of this.window.values()) await this.push.send(message);
  }
}
