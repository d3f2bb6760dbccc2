#!/usr/bin/env python3
"""Trains Stable-Baselines3's DQN, PPO, SAC or TD3 with the settings of its zoo, for a comparison with `apex train`.

bench/peers/setup.sh       # creates .peer-sb3, once
cd bench/peers
../../.peer-sb3/bin/python stable_baselines3_dqn.py train --env CartPole-v1 --seed 1 --minutes 3 --stop-score 475
../../.peer-sb3/bin/python stable_baselines3_dqn.py evaluate --episodes 100 --seed 1000001

`train` writes into --out (runs/sb3): curve.csv, a line for each evaluation with the header seconds,steps,score;
result.json; policy.npz and final.npz, the policy with the best evaluation and the one at the end. `evaluate` plays full
games with one of them, and prints one JSON object. `versions` imports the packages, and prints their versions.

The clock starts with this process (interpreter and imports included) and includes evaluations; without a stop score,
the time limit counts from the first step, as ours does. Evaluations run in the
training process, as is usual with Stable-Baselines3, and share its cores, like ours. Evaluations that do not confirm
the end take at most a tenth of the time; result.json has the share of all evaluations. The environments have the same
settings as ours.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_watch import Watch
from zoo_settings import ATARI_OPTIONS, GRID_TORSO, TASKS, UNTUNED_OPTIONS, Task

BEST, FINAL = "policy.npz", "final.npz"
GAMES_AT_ONCE = 20  # of `evaluate`: the time for a batch of actions hardly depends on its size
FOREVER = 1_000_000_000  # steps; no time limit here allows as many
PACKAGES = ("stable-baselines3", "torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")


def train(options: argparse.Namespace) -> int:
    """Trains until the stop score or the time limit, and writes the results."""
    clock = _clock_of_process()
    _use_cores(options.cores)  # Set before torch is imported, which counts the cores.
    task = TASKS[options.algorithm][options.env]
    options.out.mkdir(parents=True, exist_ok=True)
    import numpy as np
    import torch

    torch.set_num_threads(options.threads or options.cores)
    model = _make_model(options.algorithm, task, options.env, options.seed)
    start = clock() if options.stop_score is None else 0.0
    if task.is_fitted:
        _follow_the_clock(model, lambda: (clock() - start) / (60 * options.minutes))

    num_plays = 0

    def play(episodes: int) -> float:
        nonlocal num_plays
        scores = _play(model, task, options.env, episodes, seed=_draw_seed(options.seed, num_plays))
        num_plays += 1
        return float(np.mean(scores))

    def keep(file: str = BEST) -> None:
        tensors = {name: tensor.numpy(force=True) for name, tensor in model.policy.state_dict().items()}
        np.savez(options.out / file, **tensors)

    with (options.out / "curve.csv").open("w", encoding="utf-8") as curve:
        watch = Watch(
            task.evaluations,
            stop_score=options.stop_score,
            limit_seconds=start + 60 * options.minutes,
            play=play,
            keep=keep,
            curve=curve,
            clock=clock,
        )
        # After the zoo's number of steps, the schedules keep their last values until the time is over.
        model.learn(FOREVER, callback=lambda *_: watch.goes_on(model.num_timesteps), log_interval=None)
        if not watch.num_evaluations:  # A very short training has a policy too.
            watch.evaluate(model.num_timesteps)
    keep(FINAL)
    result = {
        "algorithm": options.algorithm,
        "environment": options.env,
        "seed": options.seed,
        "steps": model.num_timesteps,
        "updates": model._n_updates * _batches_per_update(options.algorithm, task),
        "seconds": round(clock(), 2),
        "reached": watch.reached,
        "evaluations": watch.num_evaluations,
        "evaluation_seconds": round(watch.evaluation_seconds, 2),
        "settings": {
            **task.settings,
            "num_steps": "until the time limit" if task.is_fitted else task.num_steps,
            "torch_threads": torch.get_num_threads(),
        },
        "versions": _describe_versions(),
        "machine": _describe_machine(),
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Plays full games with the policy of a training, and prints their raw scores."""
    result = json.loads((options.out / "result.json").read_text())
    task = TASKS[result["algorithm"]][result["environment"]]
    import numpy as np
    import torch

    torch.set_num_threads(1)
    changes = {} if result["algorithm"] == "ppo" else {"buffer_size": 1}
    model = _make_model(result["algorithm"], task, result["environment"], result["seed"], **changes)
    with np.load(options.out / (FINAL if options.final else BEST)) as tensors:
        model.policy.load_state_dict({name: torch.from_numpy(tensors[name]) for name in tensors.files})
    is_discrete = result["algorithm"] in ("dqn", "ppo")
    epsilon = options.epsilon if is_discrete else 0.0  # Policies with continuous actions are played without noise.
    task = task._replace(evaluations=task.evaluations._replace(num_envs=GAMES_AT_ONCE, epsilon=epsilon))
    scores = _play(model, task, result["environment"], options.episodes, seed=_draw_seed(options.seed, 0))
    print(json.dumps({"scores": scores, "epsilon": epsilon, "seed": options.seed}))
    return 0


def show_versions(_: argparse.Namespace) -> int:
    """Imports what trainings need, and prints the versions as a JSON object."""
    for package in ("stable_baselines3", "torch", "numpy", "gymnasium", "ale_py", "cv2"):
        importlib.import_module(package)
    print(json.dumps(_describe_versions()))
    return 0


def _make_model(algorithm: str, task: Task, environment: str, seed: int, **changes: Any) -> Any:
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.noise import NormalActionNoise

    games = _make_environments(task, environment, task.num_envs, seed=seed, is_training=True)
    num_steps = FOREVER if task.is_fitted else task.num_steps
    settings = {name: _schedule(value, num_steps) for name, value in task.settings.items()} | changes
    if "exploration_fraction" in settings:
        # This is a fraction of all steps, and there are more here than in the zoo: the schedule ends at the same step.
        settings["exploration_fraction"] *= num_steps / FOREVER
    if settings.get("policy_kwargs", {}).get("features_extractor_class") == GRID_TORSO:
        settings["policy_kwargs"] = settings["policy_kwargs"] | {"features_extractor_class": _make_grid_torso()}
    if task.noise:
        shape = games.action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, task.noise))
    return getattr(stable_baselines3, algorithm.upper())(env=games, seed=seed, **settings)


def _make_grid_torso() -> type:
    """Returns the class of the network for planes that have the channels last."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class GridTorso(BaseFeaturesExtractor):  # type: ignore[misc]
        def __init__(self, space: Any) -> None:
            super().__init__(space, features_dim=128)
            height, width, channels = space.shape
            convolution = torch.nn.Conv2d(channels, 16, 3), torch.nn.ReLU(), torch.nn.Flatten()
            hidden = torch.nn.Linear(16 * (height - 2) * (width - 2), 128), torch.nn.ReLU()
            self.layers = torch.nn.Sequential(*convolution, *hidden)

        def forward(self, planes: Any) -> Any:
            return self.layers(planes.permute(0, 3, 1, 2))

    return GridTorso


def _follow_the_clock(model: Any, share: Callable[[], float]) -> None:
    """Makes the schedules of Stable-Baselines3 follow the share of the time that is over, instead of the steps."""

    def update(*_: int) -> None:
        model._current_progress_remaining = max(0.0, 1.0 - share())

    model._update_current_progress_remaining = update


def _schedule(value: Any, num_steps: int) -> Any:
    """Returns the zoo's "lin_X" as a function of the remaining share of FOREVER steps, and other values unchanged."""
    if not (isinstance(value, str) and value.startswith("lin_")):
        return value
    first = float(value.removeprefix("lin_"))
    return lambda remaining: first * max(0.0, 1.0 - (1.0 - remaining) * FOREVER / num_steps)


def _batches_per_update(algorithm: str, task: Task) -> int:
    """Makes Stable-Baselines3 count each of PPO's gradient steps as an update, instead of each epoch."""
    settings = task.settings
    return task.num_envs * settings["n_steps"] // settings["batch_size"] if algorithm == "ppo" else 1


def _make_environments(task: Task, environment: str, num_envs: int, *, seed: int, is_training: bool) -> Any:
    import gymnasium
    from stable_baselines3.common.env_util import make_vec_env

    if environment.startswith("MinAtar/") and environment not in gymnasium.registry:
        importlib.import_module("minatar.gym").register_envs()
    if not task.is_atari:
        return make_vec_env(environment, num_envs, seed=seed)
    import ale_py
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.vec_env import VecFrameStack

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # Without this, ALE prints a greeting on standard error.
    gymnasium.register_envs(ale_py)
    games = make_vec_env(
        environment,
        num_envs,
        seed=seed,
        env_kwargs=UNTUNED_OPTIONS if task.is_untuned else ATARI_OPTIONS,
        wrapper_class=AtariWrapper,
        # The zoo evaluates with the wrapper of the training: after a lost life it presses FIRE, without which Breakout
        # does
        # not continue. Scores are those of full games, and raw, because Monitor counts them below the wrapper.
        wrapper_kwargs={"terminal_on_life_loss": not task.is_untuned, "clip_reward": is_training},
    )
    return VecFrameStack(games, 4)


def _play(model: Any, task: Task, environment: str, episodes: int, *, seed: int) -> list[float]:
    """Returns raw scores of full games. Each environment plays equally many, so that short games are not preferred."""
    import numpy as np

    num_envs, epsilon = min(task.evaluations.num_envs, episodes), task.evaluations.epsilon
    rng = np.random.default_rng(seed)
    games = _make_environments(task, environment, num_envs, seed=seed, is_training=False)
    try:
        missing = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
        scores = []
        observation = games.reset()
        while missing.any():
            actions, _ = model.predict(observation, deterministic=not task.is_sampled)
            if epsilon:  # only for discrete actions
                at_random = rng.random(num_envs) < epsilon
                actions = np.where(at_random, rng.integers(games.action_space.n, size=num_envs), actions)
            observation, _, _, infos = games.step(actions)
            for i, info in enumerate(infos):
                if missing[i] and "episode" in info:  # Monitor adds it at the end of a full game.
                    scores.append(float(info["episode"]["r"]))
                    missing[i] -= 1
        return scores
    finally:
        games.close()


def _draw_seed(seed: int, number: int) -> int:
    """Returns a seed for the games of evaluation `number`; the environment of the training has `seed` itself."""
    import numpy as np

    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) >> 1  # 31 bits, the range of ALE


def _clock_of_process() -> Callable[[], float]:
    """Returns a clock of the seconds since the start of this process, including its imports."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): field 22, in ticks since the system was booted
    return lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - began


def _use_cores(number: int) -> None:
    """Binds all threads of this process to the first `number` of its cores, as `taskset` does."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def _describe_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def _describe_machine() -> dict[str, Any]:
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Trains or evaluates; returns the exit status."""
    available = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description="Stable-Baselines3 with the settings of its zoo.")
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train, and write curve.csv, result.json and policy.npz")
    training.set_defaults(run=train)
    training.add_argument("--algorithm", choices=list(TASKS), default="dqn", help="default: dqn")
    environments = sorted({name for tasks in TASKS.values() for name in tasks})
    training.add_argument("--env", choices=environments, required=True)
    training.add_argument("--seed", type=int, required=True, metavar="K")
    training.add_argument("--minutes", type=float, required=True, metavar="M", help="time limit")
    training.add_argument(
        "--stop-score", type=float, metavar="S", help="end when an evaluation confirms this mean score"
    )
    training.add_argument("--cores", type=int, default=available, metavar="N", help=f"default: all {available}")
    training.add_argument("--threads", type=int, metavar="T", help="torch threads (default: as many as cores)")
    playing = commands.add_parser("evaluate", help="play full games with a trained policy")
    playing.set_defaults(run=evaluate)
    playing.add_argument("--final", action="store_true", help="use the policy at the end (default: the best)")
    playing.add_argument("--episodes", type=int, default=100, metavar="N")
    playing.add_argument("--seed", type=int, default=0, metavar="S", help="seed of games and random actions")
    playing.add_argument(
        "--epsilon",
        type=float,
        default=0.001,
        metavar="P",
        help="probability of random discrete actions (default, as in apex evaluate: 0.001)",
    )
    commands.add_parser("versions", help="print the versions of the packages").set_defaults(run=show_versions)
    for command in (training, playing):
        command.add_argument("--out", type=Path, default=Path("runs/sb3"), metavar="FOLDER", help="default: runs/sb3")
    options = parser.parse_args(argv)
    if options.run is train and options.env not in TASKS[options.algorithm]:
        training.error(
            f"--env must be one of {', '.join(TASKS[options.algorithm])} for {options.algorithm}, got {options.env}"
        )
    if options.run is train and not 1 <= options.cores <= available:
        training.error(f"--cores must be 1 ... {available}, got {options.cores}")
    if options.run is train and options.threads is not None and options.threads < 1:
        training.error(f"--threads must be >= 1, got {options.threads}")
    if options.run is train and not options.minutes > 0:
        training.error(f"--minutes must be > 0, got {options.minutes:g}")
    if not 0 <= getattr(options, "seed", 0) < 2**31:
        parser.error(f"--seed must be 0 ... 2147483647, got {options.seed}")
    if importlib.util.find_spec("stable_baselines3") is None:
        parser.error(f"{sys.executable} has no stable-baselines3: bench/peers/setup.sh makes .peer-sb3, which has")
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
