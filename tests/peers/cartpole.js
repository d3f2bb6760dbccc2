// CartPole-v1 with the physics of Gymnasium: Euler's method in steps of 0.02 s.
export class CartPole {
  reset() {
    this.state = Array.from({ length: 4 }, () => Math.random() * 0.1 - 0.05);
    this.length = 0;
    return Float32Array.from(this.state);
  }

  // Returns the next observation and how the episode ended. The reward is 1.
  step(action) {
    let [x, speed, angle, turn] = this.state;
    const sin = Math.sin(angle), cos = Math.cos(angle);
    const pull = ((action ? 10 : -10) + 0.05 * turn * turn * sin) / 1.1;
    const spin = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - (0.1 * cos * cos) / 1.1));
    const push = pull - (0.05 * spin * cos) / 1.1;
    x += 0.02 * speed, speed += 0.02 * push, angle += 0.02 * turn, turn += 0.02 * spin;
    this.state = [x, speed, angle, turn];
    const terminated = Math.abs(x) > 2.4 || Math.abs(angle) > Math.PI / 15;
    const truncated = ++this.length >= 500;
    return { observation: Float32Array.from(this.state), terminated, truncated };
  }
}
