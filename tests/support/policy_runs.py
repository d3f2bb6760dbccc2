"""Run folders with policies, written by the product's own functions."""

import torch

from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EnvironmentConfig, NetworkConfig, RunConfig
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.runs.checkpoints.checkpoint import LearnerState, save_checkpoint
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy
from apex.runs.folder import RunFolder
from apex.types import Progress

NETWORK = NetworkConfig(hidden=4, body_hidden=4)
CARTPOLE = EnvironmentConfig(id="CartPole-v1")


def make_run(folder, *, environment=CARTPOLE, name="mine", best=None, last=()):
    """Creates a run with a policy that always pushes to the right. `best` and `last` are its updates."""
    config = Config(environment=environment, network=NETWORK, run=RunConfig(name=name, folder=str(folder)))
    schema = describe(environment, config.actor.n_step)
    run = RunFolder.create(config, schema, argv=[])
    network = make_network(NETWORK, schema, seed=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.advantage.output.bias[-1] = 1.0
    if best is not None:
        info = PolicyInfo(schema=schema, config=config, num_updates=best, score=9.0)
        save_policy(run.checkpoints / BEST, flatten_parameters(network), info)
    for num_updates in last:
        online = network.state_dict()
        optimizer = torch.optim.SGD(network.parameters()).state_dict()
        save_checkpoint(
            run.checkpoints, LearnerState(num_updates, Progress(), config, schema, online, online, optimizer, {})
        )
    return run
