"""Writes the model card of exported weights: training, score, interface, and code to load them without this package."""

from __future__ import annotations

import json
from typing import NamedTuple

from apex.algorithms.exported import Exported
from apex.config import Config, EnvironmentConfig
from apex.config.presets import EnvironmentKind
from apex.evaluation.command import Evaluation
from apex.runs.checkpoints.policy_file import PolicyInfo
from apex.runs.folder import RunFolder
from apex.runs.report.facts import find_changes
from apex.runtime.text import duration
from apex.types import Schema

NOT_SHOWN = ("run.", "transport.")  # settings that do not affect what was trained


class OnnxFacts(NamedTuple):
    """The result of comparing an ONNX file with torch."""

    opset: int
    difference: float  # largest absolute difference of an output
    num_observations: int
    num_differing: int  # observations with another greedy action, as two Q-values are nearly equal; Q-networks only
    runtime: str  # version of onnxruntime


def write_card(
    folder: RunFolder,
    info: PolicyInfo,
    kind: EnvironmentKind,
    exported: Exported,
    *,
    evaluation: Evaluation | None,
    onnx: OnnxFacts | None,
    steps: int | None,
    license: str,
) -> str:
    """Returns the card as Markdown, with the front matter that model hubs read.

    `steps`: environment steps up to these weights; None: unknown.
    """
    config, game = folder.config, info.environment.id
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "ape-x", json.dumps(game)]
    lines = ["---", f"license: {license}", "library_name: pytorch", f"tags: [{', '.join(tags)}]", "---", ""]
    lines += [f"# Ape-X on {game}", ""]
    lines += [f"{exported.summary}, trained by distributed prioritized experience replay"]
    lines += ["([Horgan et al. 2018](https://arxiv.org/abs/1803.00933)).", ""]
    lines += ["| | |", "|---|---|", *_facts(folder, info, evaluation, steps, license)]
    lines += ["", "## Inputs and outputs", "", *_interface(info, kind, exported), ""]
    lines += [
        "## Loading it with torch alone",
        "",
        _loading(info),
        "",
        "```python",
        exported.code.rstrip(),
        "```",
        "",
    ]
    lines += [exported.use, ""]
    if onnx is not None:
        lines += ["## ONNX", "", *_onnx(onnx, exported.output, info.schema), ""]
    lines += ["## Configuration", "", *_differing(config)]
    return "\n".join(lines) + "\n"


def _facts(
    folder: RunFolder, info: PolicyInfo, evaluation: Evaluation | None, steps: int | None, license: str
) -> list[str]:
    """Returns the rows of a table about the training."""
    config, manifest = folder.config, folder.manifest
    git, hardware, versions = manifest.get("git"), manifest["hardware"], manifest["versions"]
    gpus = f", {', '.join(hardware['gpus'])}" if hardware["gpus"] else ", no GPU"
    commit = "not known" if git is None else f"`{git['commit']}`{', with uncommitted changes' if git['dirty'] else ''}"
    elapsed = folder.elapsed_seconds
    until = "" if steps is None else f", after about {steps:,} environment steps"
    trained = f"{info.num_updates:,} updates of batches of {config.learner.batch_size}{until}; seed {config.seed}"
    rows = {
        "Environment": info.environment.id,
        "Score": _score(info, config, evaluation),
        "Trained": trained,
        "Wall clock": f"{duration(elapsed)} for the whole run" if elapsed else "not known",
        "Machine": f"{hardware['cores']} cores of {hardware['cpu']}{gpus}",
        "Program": f"apex-zeromq {versions['apex']}, commit {commit}, torch {versions['torch']}",
        "Licence": f"weights: {license}; training code: MIT",
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def _score(info: PolicyInfo, config: Config, evaluation: Evaluation | None) -> str:
    """Returns the score and how it was measured."""
    if evaluation is not None:
        bounds = evaluation.interval
        interval = "" if bounds is None else ", 95 % interval {:.2f} ... {:.2f}".format(*bounds)
        return (
            f"mean {evaluation.mean:.2f}, median {evaluation.median:.2f} over {evaluation.episodes} full games"
            f"{interval}; raw rewards, epsilon {evaluation.epsilon:g}. Measured with `apex evaluate --seed "
            f"{evaluation.seed}`, which plays games with seeds that training does not use"
        )
    if info.score is None:
        return "not measured"
    games, epsilon = "full games", config.evaluator.epsilon
    if info.games is not None:
        games, epsilon = f"{info.games.episodes} full games", info.games.epsilon
    return (
        f"mean {info.score:.2f} over {games} by the run's evaluator; raw rewards, epsilon {epsilon:g}. This is the "
        "best of the run's evaluations, so the mean is biased upwards: `apex export --episodes 30` plays new games "
        "for an unbiased mean"
    )


def _interface(info: PolicyInfo, kind: EnvironmentKind, exported: Exported) -> list[str]:
    return [f"- {line}" for line in (*_preprocessing(info, kind, info.environment), *exported.facts)]


def _preprocessing(info: PolicyInfo, kind: EnvironmentKind, environment: EnvironmentConfig) -> list[str]:
    schema = info.schema
    if kind == "vector":
        (size,) = schema.frame_shape
        return [
            f"Input: float32 [batch, {size}], the environment's own observation, flattened as by "
            "`gymnasium.spaces.flatten` (a Discrete is one-hot), without scaling."
        ]
    side, stack = environment.image_size, environment.frame_stack
    lines = [
        f"Input: uint8 [batch, {stack}, {side}, {side}], 0 ... 255: the last {stack} frames, the newest last, with "
        "zeros before the first frame of an episode. The network divides by 255."
    ]
    if kind in ("image", "continuous-image"):
        gray = "Frames: gray (OpenCV's RGB2GRAY)"
        return [*lines, f"{gray}, resized to {side} x {side} by INTER_AREA if they have another size."]
    fire = "FIRE is pressed if the game waits for it"
    if environment.fire_after_life_loss:
        fire += "; after a lost life, FIRE replaces the first action"
    start = f"an episode begins with 0 ... {environment.noop_max - 1} no-ops" if environment.noop_max else "no no-ops"
    return [
        *lines,
        f"Frames: ALE's vector environment takes the pixel-wise maximum of the last two of every "
        f"{environment.frame_skip} emulator frames, in gray, resized to {side} x {side} by area interpolation.",
        f"Sticky actions {environment.sticky_actions:g}; {start}; {fire}; an episode is "
        f"a full game of at most {environment.max_episode_frames:,} emulator frames.",
        f"Actions: {'all 18 of the console' if environment.full_action_space else 'the minimal set of the game'}.",
    ]


def _loading(info: PolicyInfo) -> str:
    if not info.network.factory:
        return "`pip install torch safetensors`; the tensors are float32."
    module = info.network.factory.partition(":")[0]
    return f"The network is custom: the code needs the module `{module}`, which is not part of this export."


def _onnx(onnx: OnnxFacts, output: str, schema: Schema) -> list[str]:
    what, actions = ("a Q-value", ", and all greedy actions agree") if output == "q" else ("an action", "")
    if output == "q" and onnx.num_differing:
        actions = f", and {onnx.num_differing} greedy actions differ, because two Q-values are nearly equal"
    shape = ", ".join(map(str, schema.observation_shape))  # with the stack's axis even if its size is 1
    return [
        f"`model.onnx`, opset {onnx.opset}: input `observation`, {schema.frame_dtype} [batch, {shape}]; output "
        f"`{output}`.",
        "",
        f"On {onnx.num_observations} observations, {what} computed by onnxruntime {onnx.runtime} differs from that of "
        f"PyTorch by at most {onnx.difference:.1e}{actions}.",
        "",
        "```python",
        "import onnxruntime",
        "",
        'session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])',
        f'({output},) = session.run(["{output}"], {{"observation": observation}})  # a NumPy array',
        "```",
    ]


def _differing(config: Config) -> list[str]:
    lines = [
        "Settings that differ from the defaults, most of which are the paper's. `config.json` has all settings.",
        "",
    ]
    lines += ["| setting | value | default |", "|---|---|---|"]
    changes = [change for change in find_changes(config) if not change.name.startswith(NOT_SHOWN)]
    return lines + [f"| {change.name} | {change.value} | {change.default} |" for change in changes]
