"""A naive twin of IQN's loss: float64 leaves, and loops over rows, fractions and actions."""

import math

import torch

TAU, ALPHA, LOWEST = 0.03, 0.9, -1.0  # of Munchausen targets (Vieillard et al. 2020, appendix B.1), typed a second time


def draw(seed, batch, number):
    """Returns the fractions that an update draws after `torch.manual_seed(seed)`: of predictions, then of targets."""
    torch.manual_seed(seed)
    uniform = torch.rand(2, len(batch.action), number).tolist()
    torch.manual_seed(seed)
    return [[[(i + each) / number for i, each in enumerate(row)] for row in rows] for rows in uniform]


def h(x):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def inverse_h(y):
    """Bisection: h is increasing."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < y else (low, middle)
    return low


def huber(x):
    return x * x / 2 if abs(x) <= 1 else abs(x) - 0.5


class IqnTwin:
    """A network for vectors; `leaves`: float64, named as in the state dict."""

    def __init__(self, network, config):
        self.leaves = {name: value.double().clone().requires_grad_() for name, value in network.state_dict().items()}
        self.config = config

    def layer(self, name, x):
        return self.leaves[f"{name}.weight"] @ x + self.leaves[f"{name}.bias"]

    def head(self, name, x):
        x = self.layer(f"{name}.hidden", x)
        if self.config.iqn.layer_norm:
            x = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
            x = x * self.leaves[f"{name}.activation.0.weight"] + self.leaves[f"{name}.activation.0.bias"]
        return self.layer(f"{name}.output", torch.relu(x))

    def quantiles(self, state, fraction):
        """Returns the quantiles of all actions for one observation [D], as a tensor [A]."""
        features = torch.relu(self.layer("body.3", torch.relu(self.layer("body.1", state))))
        cosines = torch.tensor([math.cos(math.pi * i * fraction) for i in range(64)], dtype=torch.float64)
        x = features * torch.relu(self.layer("embedding.0", cosines))
        advantage = self.head("advantage", x)
        if not self.config.network.dueling:
            return advantage
        return self.head("value", x) + advantage - advantage.sum() / len(advantage)

    def returns(self, state, fractions):
        """Returns quantiles as lists of numbers, [N][A], without rescaling."""
        values = [self.quantiles(state, fraction).tolist() for fraction in fractions]
        return [[inverse_h(z) for z in row] for row in values] if self.config.network.value_rescaling else values

    def targets(self, target, batch, row, fractions):
        """Returns the samples of the target of a row; `target`: another twin."""
        s, s2 = batch.stacks[:, row, 0].double()
        reward, discount = batch.n_step_return[row].item(), batch.discount[row].item()
        samples = target.returns(s2, fractions)
        if self.config.learner.target == "double_q":
            allowed = [True] * len(samples[0]) if batch.next_mask is None else batch.next_mask[row].tolist()
            values = [self.quantiles(s2, fraction).tolist() for fraction in fractions]
            q = [
                sum(column) if yes else -math.inf
                for column, yes in zip(zip(*values, strict=True), allowed, strict=True)
            ]
            goals = [reward + discount * sample[q.index(max(q))] for sample in samples]
        else:
            log_pi = log_policy(target.returns(s, fractions))[batch.action[row]]
            bonus = ALPHA * min(0.0, max(LOWEST, TAU * log_pi))
            logs = log_policy(samples)
            goals = [
                reward
                + bonus
                + discount * sum(math.exp(log) * (z - TAU * log) for log, z in zip(logs, sample, strict=True))
                for sample in samples
            ]
        return [h(goal) for goal in goals] if self.config.network.value_rescaling else goals

    def loss(self, target, batch, fractions):
        """Returns the loss as a tensor, and the |TD errors|; `fractions`: as from `draw`."""
        loss, td_errors, size = 0.0, [], len(batch.action)
        for row in range(size):
            goals = self.targets(target, batch, row, fractions[1][row])
            state = batch.stacks[0, row, 0].double()
            predicted = [self.quantiles(state, fraction)[batch.action[row]] for fraction in fractions[0][row]]
            for theta, fraction in zip(predicted, fractions[0][row], strict=True):
                for goal in goals:
                    delta = goal - theta
                    share = abs(fraction - (1.0 if delta.item() < 0 else 0.0))
                    loss = loss + batch.weights[row].item() * share * huber(delta) / len(goals) / size
            td_errors.append(abs(sum(goals) / len(goals) - sum(theta.item() for theta in predicted) / len(predicted)))
        return loss, td_errors


def log_policy(quantiles):
    """Returns log pi of each action, of the softmax policy of mean quantiles [N][A]."""
    q = [sum(column) / len(quantiles) for column in zip(*quantiles, strict=True)]
    most = max(q)
    total = math.log(sum(math.exp((value - most) / TAU) for value in q))
    return [(value - most) / TAU - total for value in q]
