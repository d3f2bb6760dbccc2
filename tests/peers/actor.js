// node actor.js HOST PORT STREAMS [KEYS]: plays CartPole for the learner whose control
// address is HOST:PORT, until the run ends. KEYS: folder of an actor's keys.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Push, Subscriber } from "zeromq";
import { Network } from "./network.js";
import { receiptsOf, Stream } from "./stream.js";
import { control, header, PARAMETERS, unpack } from "./wire.js";

const [host, port, count, folder] = process.argv.slice(2);
const read = (file, name) =>
  readFileSync(join(folder, file), "latin1").match(`${name}-key = "(.{40})"`)[1];
function keysFor(role) { // of a socket that the role binds
  if (!folder) return {};
  const file = readdirSync(folder).find((each) => RegExp(`^${role}\\..*key$`).test(each));
  const [publicKey, secretKey] = ["public", "secret"].map((name) => read("actor.key_secret", name));
  return { curveServerKey: read(file, "public"), curvePublicKey: publicKey, curveSecretKey: secretKey };
}

const learner = control(`tcp://${host}:${port}`, keysFor("learner"));
const program = { host: "node", pid: process.pid, shard: 0 };
const hello = { type: "hello", wire: 6, role: "actor", ...program, num_streams: Number(count) };
const welcome = await learner.greet(hello, ({ streams, replay }) => streams.length && replay.length);
if (!welcome) process.exit(0);
const { config, replay, run_id, streams: leased } = welcome;
const pushes = replay.map((shard) => new Push({ linger: 1000, ...keysFor("replay") }));
pushes.forEach((push, shard) => push.connect(replay[shard].experience));

const source = new Subscriber({ conflate: true, ...keysFor("learner") });
source.connect(`tcp://${host}:${config.transport.parameters_port + config.transport.port_offset}`);
source.subscribe(header(PARAMETERS, {}, []).subarray(0, 8)); // as f4
let published = null, bytes = 0;
(async () => {
  for await (const parts of source) published = unpack(parts), bytes += published.body.length;
})();
const network = new Network(welcome.parameters);

const receipts = new Subscriber(keysFor("replay"));
replay.forEach((shard) => receipts.connect(shard.receipts));
const span = welcome.table.item.span, own = { ...welcome, span, actor: config.actor, network, pushes, receipts };
const streams = leased.map((lease) => new Stream(lease, own));
(async () => {
  for await (const parts of receipts) {
    for (const receipt of receiptsOf(unpack(parts)))
      streams.find(({ fields }) => fields.sender === receipt.sender)?.acknowledge(receipt);
  }
})();

let over = false, answered = true, before = 0, waited = 0, status = 0;
const numSteps = () => streams.reduce((sum, { steps }) => sum + steps, 0);
function beat() {
  const steps = numSteps(), games = () => streams.flatMap((each) => each.take());
  const scores = answered ? { scores: { actors: games() } } : {};
  const figures = { waiting: null, num_steps: steps, steps_per_second: steps - before,
    wait_share: Math.min(1, waited / 1000), parameter_bytes_per_second: bytes };
  before = steps, waited = bytes = 0, answered = false;
  const message = { type: "actor_heartbeat", run_id, ...program, streams: leased, endpoints: {} };
  return learner.send({ ...message, status: figures, ...scores });
}
(async () => {
  for (;;) {
    const answer = await learner.receive();
    answered ||= Boolean(answer);
    const moved = ![0, undefined, welcome.generation].includes(answer?.generation);
    if (answer?.type === "refused" || moved) status = 75; // Start again.
    over ||= Boolean(answer?.stop) || status === 75;
  }
})();
await beat();
const beats = setInterval(beat, 1000 * config.transport.heartbeat_seconds);

for (let step = 0; !over; ) {
  await new Promise(setImmediate); // Messages arrive.
  for (const each of streams) await each.resend();
  if (published && (step % config.actor.parameters_period === 0 || network.version < 0))
    network.load(published);
  if (network.version < 0 || streams.some(({ full }) => full)) {
    const since = Date.now();
    await new Promise((done) => setTimeout(done, 1));
    waited += Date.now() - since;
    if (published && network.version >= 0) network.load(published); // The learner went on meanwhile.
    continue;
  }
  for (const each of streams) await each.step();
  step++;
}
clearInterval(beats), (answered = true);
await beat();
await learner.send({ type: "goodbye" });
console.log(JSON.stringify({ steps: numSteps(), version: network.version, streams: leased.length }));
setTimeout(() => process.exit(status), 300);
