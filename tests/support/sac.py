"""A naive twin of SAC: float64, row by row and critic by critic, with torch.distributions and plain autograd."""

import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform


def draw(seed, batch):
    """Returns the noise that an update draws after `torch.manual_seed(seed)`: of s_t, then of s_{t+m}."""
    torch.manual_seed(seed)
    noise = [torch.randn_like(batch.action).double() for _ in range(2)]
    torch.manual_seed(seed)
    return noise


class SacTwin:
    """The networks as float64 leaves, named as in the state dict; Adam."""

    def __init__(self, network, config):
        self.config = config
        self.leaves = {name: tensor.double().clone() for name, tensor in network.state_dict().items()}
        self.trained = {name: leaf.requires_grad_() for name, leaf in self.leaves.items() if "normalizer" not in name}
        learner = config.learner
        self.optimizer = torch.optim.Adam(
            [
                {"params": [leaf for name, leaf in self.trained.items() if name.startswith("policy") is is_policy]}
                | {"lr": learner.learning_rate * share}
                for is_policy, share in ((False, 1.0), (True, config.dpg.policy_learning_rate_share))
            ],
            eps=learner.optimizer_epsilon,
        )

    def layer(self, name, x, critic=None):
        weight, bias = self.leaves[f"{name}.weight"], self.leaves[f"{name}.bias"]
        return x @ weight.T + bias if critic is None else x @ weight[critic] + bias[critic, 0]

    def perceptron(self, part, x, critic=None):
        first = torch.tanh if self.config.dpg.first_activation == "tanh" else torch.relu
        hidden = first(self.layer(f"{part}.hidden1", x, critic))
        return self.layer(f"{part}.output", torch.relu(self.layer(f"{part}.hidden2", hidden, critic)), critic)

    def prepare(self, x):
        if "normalizer.mean" not in self.leaves:
            return x
        mean, variance = self.leaves["normalizer.mean"][0], self.leaves["normalizer.variance"][0]
        return ((x - mean) / variance.sqrt()).clamp(-10, 10)

    def policy(self, x, noise):
        """Returns an action of one observation and its log density."""
        mean, log_deviation = self.perceptron("policy", x).chunk(2)
        normal = Normal(mean, log_deviation.clamp(-20, 2).exp())
        squashed = TransformedDistribution(Independent(normal, 1), [TanhTransform(cache_size=1)])
        action = torch.tanh(mean + normal.scale * noise)
        return action, squashed.log_prob(action)

    def q(self, x, action):
        inputs = torch.cat([x, action])
        return torch.stack([self.perceptron("critics", inputs, critic)[0] for critic in range(2)])

    def losses(self, target, batch, noise):
        """Returns |TD errors|, and the losses of critics, policy and temperature. `target`: another twin."""
        rows = [row.double() for row in batch.tensors]
        (seen, following), actions, returns, discounts, weights = rows
        alpha = self.leaves["log_temperature"].exp()
        goal = -self.config.sac.target_entropy_scale * actions.shape[1]
        td_errors, critics, policy, temperature = [], 0.0, 0.0, 0.0
        for i in range(len(actions)):
            s, s2 = seen[i, 0], following[i, 0]
            with torch.no_grad():
                a2, log_pi2 = self.policy(self.prepare(s2), noise[1][i])
                soft_value = target.q(target.prepare(s2), a2).min() - alpha * log_pi2
                y = returns[i] + discounts[i] * soft_value
            q = self.q(self.prepare(s), actions[i])
            td_errors.append(abs((y - q.mean()).item()))
            critics = critics + weights[i] * ((y - q) ** 2).sum() / 2 / len(actions)
            a, log_pi = self.policy(self.prepare(s), noise[0][i])
            value = self.q(self.prepare(s), a).min()
            policy = policy + weights[i] * (alpha.detach() * log_pi - value) / len(actions)
            temperature = temperature - weights[i] * alpha * (log_pi.detach() + goal) / len(actions)
        return td_errors, critics, policy, temperature

    def update(self, target, batch, noise):
        """Makes one update; returns |TD errors| and the losses."""
        td_errors, *losses = self.losses(target, batch, noise)
        parts = ("critics", "policy", "log_temperature")
        for part, loss in zip(parts, losses, strict=True):
            leaves = [leaf for name, leaf in self.trained.items() if name.startswith(part)]
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves, retain_graph=True), strict=True):
                leaf.grad = gradient
            if part != "log_temperature":
                torch.nn.utils.clip_grad_norm_(leaves, self.config.learner.max_gradient_norm)
        self.optimizer.step()
        if "normalizer.mean" in self.leaves:
            self.count_in(batch.stacks[0].double())
        return td_errors, [loss.item() for loss in losses]

    def count_in(self, rows):
        """Adds rows [B, 1, D] to mean and variance, computed from the sums of values and squares."""
        mean, variance, count = (self.leaves[f"normalizer.{name}"] for name in ("mean", "variance", "count"))
        both = count + len(rows)
        square = (count * (variance + mean**2) + (rows**2).sum(0)) / both
        mean = (count * mean + rows.sum(0)) / both
        self.leaves |= {
            "normalizer.mean": mean,
            "normalizer.variance": square - mean**2,
            "normalizer.count": both,
        }
