"""A run is fitted to its host, or refused, before any program of it is started."""

import dataclasses
import json
import subprocess
import sys

import pytest
from support.builders import VECTORS

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig, TransportConfig, to_dict
from apex.errors import UsageError
from apex.launch.preflight.fit import fit, require_head
from apex.launch.preflight.requirements import files_needed
from apex.runtime.gpu import read_cuda

CONFIG = Config(
    actor=ActorConfig(num_actors=8),
    replay=ReplayConfig(capacity=1_000, min_size_to_sample=500),
    learner=LearnerConfig(batch_size=0, device="cpu", bfloat16="auto"),
    run=RunConfig(tensorboard=False),
)
LIMITED = """
import json, resource, sys
from apex.config import from_dict
from apex.launch.preflight.fit import fit, require_head
from apex.types import Schema
config, schema = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 4_096))
fit(from_dict(config), Schema.from_dict(schema), print)
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def run_limited(config):
    """Fits in a process of its own, which may have 40 files open, and raise that to 4,096."""
    told = json.dumps([to_dict(config), VECTORS.to_dict()])
    return subprocess.run([sys.executable, "-c", LIMITED, told], capture_output=True, text=True, timeout=60)


def test_every_size_is_a_number_and_the_arithmetic_is_told():
    config, sizes = fit(CONFIG, VECTORS, lambda sentence: None)
    assert min(config.actor.num_processes, config.actor.envs_per_process, config.learner.num_threads) >= 1
    assert config.learner.batch_size >= 64
    assert config.learner.bfloat16 != "auto"
    assert sizes[0].startswith("machine: ")


def test_the_limit_of_open_files_is_raised_where_the_run_needs_more():
    done = run_limited(CONFIG)
    sized, _ = fit(CONFIG, VECTORS, lambda sentence: None)
    assert json.loads(done.stdout.splitlines()[-1]) == [files_needed(sized)[0], 4_096]


@pytest.mark.skipif(read_cuda().usable, reason="this host has a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_remedy():
    asked = dataclasses.replace(CONFIG, learner=LearnerConfig(device="cuda"), replay=ReplayConfig())
    with pytest.raises(UsageError, match=r"--device cuda.*or use --device cpu"):
        fit(asked, VECTORS, lambda sentence: None)


def test_more_actors_than_a_process_may_have_connections_to_are_refused():
    actors = ActorConfig(num_actors=65_536, num_processes=1, envs_per_process=1)
    done = run_limited(dataclasses.replace(CONFIG, actor=actors))
    assert done.returncode != 0
    assert "UsageError: open files: one process may need 131140 open files" in done.stderr


def head(*, bind="127.0.0.1", single_process=False, **actor):
    return Config(
        actor=ActorConfig(**actor),
        run=RunConfig(head=True, single_process=single_process),
        transport=TransportConfig(bind=bind, insecure_no_auth=bind != "127.0.0.1"),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (head(), "--head needs --actors N"),
        (head(num_actors=8, single_process=True), "--head and --single-process exclude each other: leave one out"),
        (head(num_actors=8, bind="0.0.0.0"), "--head cannot use --transport.bind 0.0.0.0: set the address of this"),
    ],
)
def test_a_head_that_no_actor_host_could_join_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        require_head(config)


def test_a_head_may_bind_to_an_address_by_which_actor_hosts_reach_it():
    require_head(head(num_actors=8, bind="10.0.0.2"))
