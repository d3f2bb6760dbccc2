"""A run is sized for its host, or refused, before any of its programs starts."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders import VECTORS

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig, TransportConfig, to_dict
from apex.launch.preflight.fit import fit, require_head, size_beside
from apex.launch.preflight.requirements import files_needed
from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import Machine
from apexreplay.errors import UsageError

CONFIG = Config(
    actor=ActorConfig(num_actors=8),
    replay=ReplayConfig(capacity=1_000, min_size_to_sample=500),
    learner=LearnerConfig(batch_size=0, device="cpu", bfloat16="auto"),
    run=RunConfig(tensorboard=False),
)
LIMITED = """
import json, resource, sys
from apex.config import from_dict
from apex.launch.preflight.fit import fit
from apex.schema import Schema
config, schema = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 4_096))
fit(from_dict(config), Schema.from_dict(schema), print)
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def run_limited(config):
    """Calls `fit` in a process with a limit of 40 open files, which it can raise to 4,096."""
    argument = json.dumps([to_dict(config), VECTORS.to_dict()])
    return subprocess.run([sys.executable, "-c", LIMITED, argument], capture_output=True, text=True, timeout=60)


def test_every_size_is_chosen_and_explained():
    config, lines = fit(CONFIG, VECTORS, lambda sentence: None)
    assert min(config.actor.num_processes, config.actor.envs_per_process, config.learner.num_threads) >= 1
    assert config.learner.batch_size >= 64
    assert config.learner.bfloat16 != "auto"
    assert any(f" {config.learner.batch_size} (chosen" in line for line in lines)
    assert not any("actors" in line and "(chosen" in line for line in lines)  # The number of actors is configured.


def test_a_run_is_sized_beside_the_memories_of_killed_runs():
    pixels = dataclasses.replace(VECTORS, frame_shape=(84, 84), frame_dtype="uint8", codec="lz4")
    asked = dataclasses.replace(CONFIG, replay=ReplayConfig(capacity=2**20, min_size_to_sample=500))
    machine, kept = Machine(cores=2, memory_bytes=2**31, gpu=False), {Path("apex-1-0.replay"): 2**30}
    alone, beside = size_beside({}, asked, machine, pixels), size_beside(kept, asked, machine, pixels)
    assert alone.table_bytes + alone.config.replay.max_bytes == 2**30  # half of the memory
    assert beside.table_bytes + beside.config.replay.max_bytes == 2**29
    assert beside.machine == machine
    fixed = dataclasses.replace(asked, replay=ReplayConfig(capacity=1_000, min_size_to_sample=500, max_bytes=3 * 2**29))
    assert size_beside(kept, fixed, machine, pixels).config.replay.max_bytes == 3 * 2**29  # They must go.


def test_the_limit_of_open_files_is_raised():
    done = run_limited(CONFIG)
    sized, _ = fit(CONFIG, VECTORS, lambda sentence: None)
    assert json.loads(done.stdout.splitlines()[-1]) == [files_needed(sized), 4_096]


@pytest.mark.skipif(read_cuda().usable, reason="this host has a GPU")
def test_a_missing_gpu_is_refused():
    asked = dataclasses.replace(CONFIG, learner=LearnerConfig(device="cuda"), replay=ReplayConfig())
    with pytest.raises(UsageError, match="--device cuda") as error:
        fit(asked, VECTORS, lambda sentence: None)
    assert "--device cpu" in error.value.remedy


def test_too_many_actors_for_the_file_limit_are_refused():
    actors = ActorConfig(num_actors=65_536, num_processes=1, envs_per_process=1)
    done = run_limited(dataclasses.replace(CONFIG, actor=actors))
    assert done.returncode != 0
    assert all(text in done.stderr for text in ("UsageError", "open files", "131,140", "ulimit -n 131140"))


def head(*, bind="127.0.0.1", single_process=False, **actor):
    return Config(
        actor=ActorConfig(**actor),
        run=RunConfig(head=True, single_process=single_process),
        transport=TransportConfig(bind=bind, insecure_no_auth=bind != "127.0.0.1"),
    )


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (head(), "--head needs --actors"),
        (head(num_actors=8, single_process=True), "--head and --single-process"),
        (head(num_actors=8, bind="0.0.0.0"), r"--transport\.bind 0\.0\.0\.0"),
    ],
)
def test_a_head_that_no_actor_host_could_join_is_refused(config, option):
    with pytest.raises(UsageError, match=option) as error:
        require_head(config)
    assert error.value.remedy


def test_a_head_may_bind_to_an_address_of_the_host():
    require_head(head(num_actors=8, bind="10.0.0.2"))
