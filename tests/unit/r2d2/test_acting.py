"""The states that an actor sends are those of its network, over real episodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.r2d2 import make_config

from apex.acting.worker import make_actor, make_environments
from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.config import EnvironmentConfig
from apex.config.algorithm_choice import with_sequences
from apex.environments.factory import describe
from apex.types import Parameters
from apexreplay.frame_blob import read_table
from apexreplay.types import Stream


class Outbox:
    """Keeps all segments, and acknowledges them at once."""

    blocked = in_flight = False

    def __init__(self):
        self.cuts = [[], []]

    def send(self, cuts, version):
        for cut in cuts:
            self.cuts[cut.stream_index].append(cut)

    def pump(self, timeout):
        pass


class Fixed:
    """The parameters of one network, published once."""

    def __init__(self, network):
        self.values = flatten_parameters(network)

    def newer(self, known):
        return None if known else (1, Parameters(1, self.values))


def frames_of(cut, record):
    table = read_table(cut.blob, np.frombuffer(cut.blob[:4], "<u4")[0] // 4 - 1)
    last, depth = int(record["frame"]), int(record["depth"])
    return np.frombuffer(cut.blob[table[last + 1 - depth] : table[last + 1]], np.float32).reshape(1, depth, -1)


@pytest.mark.parametrize("limit", [None, 9])
def test_each_stored_state_follows_from_that_of_the_sequence_before(limit):
    """Random actions end episodes of CartPole after about 20 steps; `limit` cuts them off earlier."""
    small = make_config()
    args = {} if limit is None else {"max_episode_steps": limit}
    game = EnvironmentConfig(id="CartPole-v1", args=args, clip_rewards=False)
    config = replace(small, environment=game, actor=replace(small.actor, num_actors=2))
    schema = with_sequences(config, describe(game, config.actor.n_step))
    streams = [Stream(0, 1), Stream(1, 1)]
    environment, rng = make_environments(config, streams)
    network = make_algorithm(config, schema).make_network()
    outbox = Outbox()
    actor = make_actor(config, schema, environment, streams, link=outbox, parameters=Fixed(network), rng=rng)
    actor.begin()
    for _ in range(300):
        actor.step(0.0)
    actor.end(0.0)
    environment.close()
    num_firsts = num_others = 0
    for cuts in outbox.cuts:
        expected = None
        for cut in cuts:
            for record in cut.records:
                if record["span"][0]:
                    assert not record["state"].any()
                    num_firsts += 1
                else:
                    assert np.allclose(record["state"], expected, atol=1e-6)
                    num_others += 1
                frames = torch.from_numpy(frames_of(cut, record)[:, : schema.sequence_period].copy())
                with torch.no_grad():
                    expected = network(frames, torch.from_numpy(record["state"][None].copy()))[1].numpy()[0]
    assert num_firsts > 20
    assert num_others > 20
