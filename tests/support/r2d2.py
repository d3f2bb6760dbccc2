"""A naive twin of R2D2's update: float64, sequence by sequence, step by step, with an LSTM written out; and batches."""

from dataclasses import replace

import numpy as np
import torch

from apex.algorithms.gradient_step import SequenceBatch
from apex.algorithms.n_step import rescale, restore
from apex.config import Config, LearnerConfig, NetworkConfig, R2d2Config
from apex.config.algorithm_choice import with_sequences
from apex.schema import Schema

LENGTH, BURN_IN, N = 8, 3, 2  # steps of a sequence, of its burn-in, of a window
A, D = 3, 8  # actions; numbers of a state
PERIOD = LENGTH - BURN_IN - N


def make_config(*, learner=None, network=None, **changes):
    fields = {"sequence_length": LENGTH, "burn_in": BURN_IN, "units": D // 2} | changes
    small = {"hidden": 5, "body_hidden": 6} | (network or {})
    rule = {"num_threads": 1, "optimizer": "adam", "learning_rate": 1e-2} | (learner or {})
    config = Config(
        algorithm="r2d2",
        learner=LearnerConfig(**rule),
        network=NetworkConfig(**small),
        r2d2=R2d2Config(**fields),
    )
    return replace(config, actor=replace(config.actor, n_step=N))


def make_schema(config, *, shape=(4,), dtype="float32", codec="raw", stack=1, num_actions=A, n_step=N, **changes):
    form = Schema(
        frame_shape=shape,
        frame_dtype=dtype,
        stack=stack,
        num_actions=num_actions,
        n_step=n_step,
        codec=codec,
        **changes,
    )
    return with_sequences(config, form)


def make_batch(rng, schema, kinds, *, weights=None, masked=False):
    """Returns a batch with a sequence for each kind.

    "whole": begins within its episode. "first": begins it. "short": begins it, and the episode ends after three steps,
    in a terminal state. "end": begins within the episode, which is cut off after five steps.
    """
    spans = {
        "whole": [0, 0, 0, 2, 2, 2, 0, 0],
        "first": [2, 2, 2, 2, 2, 2, 0, 0],
        "short": [2, 2, 1, 0, 0, 0, 0, 0],
        "end": [0, 0, 0, 2, 1, 0, 0, 0],
    }
    span = np.array([spans[kind] for kind in kinds], np.uint8)
    size = len(kinds)
    frames = rng.normal(size=(1, size, LENGTH, *schema.frame_shape)).astype(np.float32)
    state = rng.normal(size=(size, D)).astype(np.float32)
    discount = np.where(span > 0, 0.9 ** span.astype(np.float64), 0).astype(np.float32)
    for row, kind in enumerate(kinds):
        if kind in ("first", "short"):
            state[row] = 0
        if kind == "short":
            discount[row, 1:] = 0
            frames[0, row, 4:] = 0
    mask = rng.random((size, LENGTH, A)) < 0.6
    mask[..., 1] = True
    rows = {
        "stacks": frames,
        "action": rng.integers(A, size=(size, LENGTH)),
        "n_step_return": np.where(span > 0, rng.normal(size=span.shape), 0).astype(np.float32),
        "discount": discount,
        "weights": np.asarray(weights or rng.random(size), np.float32),
        "span": span,
        "state": state,
    } | ({"next_mask": mask} if masked else {})
    return SequenceBatch(**{name: torch.from_numpy(row) for name, row in rows.items()})


class Twin:
    """The recurrent network for vectors, as float64 leaves that are named as in its state dict."""

    def __init__(self, network, config):
        self.config = config
        self.leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in network.state_dict().items()}

    def layer(self, name, x):
        return self.leaves[f"{name}.weight"] @ x + self.leaves[f"{name}.bias"]

    def step(self, frame, state):
        """Returns the Q-values of one frame, float64[A], and the next state."""
        x = torch.relu(self.layer("q.body.3", torch.relu(self.layer("q.body.1", frame.flatten()))))
        h, c = state.chunk(2)
        w = {kind: self.leaves[f"recurrent.{kind}_l0"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        i, f, g, o = (w["weight_ih"] @ x + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"]).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        heads = [
            self.layer(f"q.{k}.output", torch.relu(self.layer(f"q.{k}.hidden", h))) for k in ("value", "advantage")
        ]
        return heads[0] + heads[1] - heads[1].mean(), torch.cat([h, c])

    def unroll(self, frames, state, warm):
        """Returns the Q-values of all frames. Of `warm` first steps, the state has no gradient."""
        values = []
        for t, frame in enumerate(frames):
            if t == warm:
                state = state.detach()
            q, state = self.step(frame, state)
            values.append(q)
        return values

    def losses(self, target, batch):
        """Returns the mean loss, the priorities of the sequences, and all |TD errors|."""
        rescaled, kind = self.config.network.value_rescaling, self.config.learner.target
        total, count, priorities, everything = 0.0, 0, [], []
        for row in range(len(batch.span)):
            spans, frames = batch.span[row].tolist(), batch.stacks[0, row].double()
            warm = 0 if spans[0] else self.config.r2d2.burn_in
            state = batch.state[row].double()
            q = self.unroll(frames, state, warm)
            with torch.no_grad():
                other = target.unroll(frames, state, 0)
            errors = []
            for t, m in enumerate(spans):
                if not m:
                    continue
                action = batch.action[row, t]
                values = [restore(v) if rescaled else v for v in (other[t], other[t + m])]
                if kind == "munchausen":
                    log_policy = 0.03 * torch.log_softmax(values[0] / 0.03, 0)[action]
                    policy = torch.softmax(values[1] / 0.03, 0)
                    soft = (policy * (values[1] - 0.03 * torch.log_softmax(values[1] / 0.03, 0))).sum()
                    bonus = 0.9 * max(log_policy.item(), -1.0)
                    goal = batch.n_step_return[row, t].double() + bonus + batch.discount[row, t].double() * soft
                else:
                    best = q[t + m].detach().clone()
                    if batch.next_mask is not None:
                        best[~batch.next_mask[row, t]] = -torch.inf
                    goal = (
                        batch.n_step_return[row, t].double()
                        + batch.discount[row, t].double() * values[1][best.argmax()]
                    )
                error = (rescale(goal) if rescaled else goal).detach() - q[t][action]
                total = total + batch.weights[row].double() * error**2 / 2
                count += 1
                errors.append(abs(error.item()))
            share = self.config.r2d2.priority_max_share
            priorities.append(share * max(errors) + (1 - share) * sum(errors) / len(errors))
            everything += errors
        return total / count, priorities, everything
