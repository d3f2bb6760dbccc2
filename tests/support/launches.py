"""Small runs, and replacements of their programs."""

import dataclasses

from apex.config import Config, EnvironmentConfig, RunConfig
from apex.runtime.supervisor import Program


def cartpole(path, **run):
    """Returns a small run of CartPole below `path`."""
    return Config(
        environment=EnvironmentConfig(id="CartPole-v1"),
        replay=dataclasses.replace(Config().replay, capacity=2_000, min_size_to_sample=1_000),
        run=RunConfig(folder=str(path), name="mine", tensorboard=False, **run),
    )


def stand_in(role, script, **options):
    return Program(role=role, command=("sh", "-c", script), **options)
