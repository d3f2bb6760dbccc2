// The network for vectors of docs/protocol.md, with the published parameters.
export class Network {
  constructor(parameters) {
    this.parameters = parameters, this.version = -1, this.tensors = {};
  }

  // Takes the values of a parameters message.
  load({ number, body }) {
    if (this.version === Number(number)) return;
    const values = new Float32Array(Uint8Array.from(body).buffer);
    let at = 0;
    for (const [name, shape] of this.parameters)
      this.tensors[name] = values.subarray(at, (at += shape.reduce((product, n) => product * n, 1)));
    this.version = Number(number);
  }

  layer(name, x) {
    const weight = this.tensors[`${name}.weight`];
    return this.tensors[`${name}.bias`].map((sum, row) => {
      for (let i = 0, at = row * x.length; i < x.length; i++) sum += weight[at++] * x[i];
      return name.endsWith("output") ? sum : Math.max(0, sum);
    });
  }

  head(name, x) {
    return this.layer(`${name}.output`, this.layer(`${name}.hidden`, x));
  }

  // Returns Q of each action.
  q(observation) {
    const x = this.layer("body.3", this.layer("body.1", observation));
    const advantage = this.head("advantage", x);
    if (!this.tensors["value.output.bias"]) return advantage;
    const mean = advantage.reduce((sum, a) => sum + a) / advantage.length;
    const base = this.head("value", x)[0] - mean;
    return advantage.map((a) => base + a);
  }
}
