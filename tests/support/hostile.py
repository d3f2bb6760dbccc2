"""Run folders and policy files that somebody else has prepared: their settings name modules of other packages."""

from dataclasses import replace
from pathlib import Path

import torch
from support.builders import VECTORS

from apex.config import ActorConfig, Config, EnvironmentConfig, NetworkConfig, RunConfig
from apex.dqn.networks import make_network
from apex.runs.checkpoints.checkpoint import LearnerState, save_checkpoint
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, encode_policy
from apex.runs.folder import RunFolder
from apex.types import Progress

CANARY = "import pathlib\npathlib.Path({imported!r}).touch()\n\ndef make(*args, **options): ...\n"

SIZES = NetworkConfig(hidden=4, body_hidden=4)


def names(folder: Path) -> dict[str, dict]:
    """Names in the form of environment.id, and arguments with which a call has an effect in `folder`."""
    ran = str(folder / "ran")
    return {
        "subprocess:check_output": {"args": ["touch", ran]},
        "subprocess:Popen": {"args": ["touch", ran]},
        "os:system": {"command": f"touch {ran}"},
        "os:makedirs": {"name": ran},
        "posix:mkdir": {"path": ran},
        "shutil:copyfile": {"src": __file__, "dst": ran},
        "builtins:exec": {},
        "builtins:eval": {},
        "builtins:__import__": {"name": "canary"},
        "importlib:import_module": {"name": "canary"},
        "runpy:run_path": {"path_name": str(folder / "canary.py")},
        "torch.hub:load": {"repo_or_dir": str(folder), "model": "make", "source": "local"},
        "torch.utils.cpp_extension:load": {"name": "canary", "sources": [], "build_directory": ran},
        "psutil:Popen": {"args": ["touch", ran]},
        "gymnasium:make": {"id": "canary:Id-v0"},
        "gymnasium.envs.registration:load_env_creator": {"name": "canary:make"},
        "apexreplay.process.spawn:spawn": {"command": ["touch", ran]},
        "apex.runtime.importer:import_module": {"setting": "x", "path": "canary:make"},
        "canary:make": {},
        "canary.inner:make": {},
        "canary:Id-v0": {},
        "canary.inner:Id-v0": {},
        "../canary:make": {},
    }


def plant(folder: Path) -> None:
    """Writes a module into `folder` that leaves the file `imported` there when it is imported."""
    (folder / "canary.py").write_text(CANARY.format(imported=str(folder / "imported")))


class HostileRun:
    """A run folder, an exported model and a TOML file that all name the same module in one setting."""

    def __init__(self, folder: Path, setting: str, value: str, args: dict) -> None:
        config = Config(
            environment=EnvironmentConfig(id="CartPole-v1"),
            network=SIZES,
            actor=ActorConfig(num_actors=4),
            run=RunConfig(folder=str(folder)),
        )
        if setting == "environment.id":
            config = replace(config, environment=EnvironmentConfig(id=value, args=args))
        elif setting == "network.factory":
            config = replace(config, network=replace(SIZES, factory=value))
        else:
            config = replace(config, algorithm=value)
        self.setting, self.value, self.config = setting, value, config
        run = RunFolder.create(config, VECTORS, argv=[])
        network = make_network(SIZES, VECTORS, seed=1)
        self.path, self.model, self.toml = run.path, run.path / "model.safetensors", run.path / "hostile.toml"
        policy = encode_policy(network, PolicyInfo(schema=VECTORS, config=config, num_updates=5, score=9.0))
        for path in (self.model, run.checkpoints / BEST):
            path.write_bytes(policy)
        state, optimizer = network.state_dict(), torch.optim.SGD(network.parameters()).state_dict()
        save_checkpoint(run.checkpoints, LearnerState(5, Progress(), config, VECTORS, state, state, optimizer, {}))
        branch, _, leaf = setting.rpartition(".")
        table = f"[{branch}]\n" if branch else ""
        extra = "".join(f"args.{key} = {entry!r}\n" for key, entry in args.items()) if leaf == "id" else ""
        self.toml.write_text(f"{table}{leaf} = {value!r}\n{extra}")
