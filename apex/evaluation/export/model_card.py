"""The model card of exported weights: training, score, interface, and code that loads them without this package."""

from __future__ import annotations

import json
from typing import NamedTuple

from apex.config import Config, EnvironmentConfig
from apex.config.presets import EnvironmentKind
from apex.evaluation.command import Evaluation
from apex.runs.checkpoints.policy_file import PolicyInfo
from apex.runs.folder import RunFolder
from apex.runs.report.facts import find_changes
from apex.runtime.text import duration

NOT_SHOWN = ("run.", "transport.")  # settings that say where a run was, not what was trained

# This code works without this package. The tests run it as it stands.
LINEAR = """\
import torch.nn.functional as F
from safetensors.torch import load_file

w = load_file("model.safetensors")

def linear(name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

"""
IMAGE_BODY = """\
def q_values(x):  # uint8 {shape} -> float32 [batch, {num_actions}]
    x = x.float() * (1 / 255)
    for i, stride in enumerate((4, 2, 1), start=1):
        x = F.relu(F.conv2d(x, w[f"conv{{i}}.weight"], w[f"conv{{i}}.bias"], stride))
    x = x.flatten(1)
"""
VECTOR_BODY = """\
def q_values(x):  # float32 {shape} -> float32 [batch, {num_actions}]
    x = F.relu(linear("linear2", F.relu(linear("linear1", x))))
"""
DUELING_HEADS = """\
    v, a = (linear(f"{head}.output", F.relu(linear(f"{head}.hidden", x))) for head in ("value", "advantage"))
    return v + a - a.mean(1, keepdim=True)
"""
ONE_HEAD = """\
    return linear("q.output", F.relu(linear("q.hidden", x)))
"""
CUSTOM = """\
from types import SimpleNamespace

from safetensors.torch import load_file
from {module} import {name}

schema = SimpleNamespace(**{schema})
q_values = {name}(schema).eval()  # {dtype} {shape} -> float32 [batch, {num_actions}]
q_values.load_state_dict(load_file("model.safetensors"))
"""


class OnnxFacts(NamedTuple):
    """An ONNX file that was compared with torch."""

    opset: int
    difference: float  # the largest absolute one of any Q-value
    num_observations: int
    num_differing: int  # greedy actions that differ, which happens only if two Q-values are nearly equal
    runtime: str  # version of onnxruntime


def write_card(
    folder: RunFolder,
    info: PolicyInfo,
    kind: EnvironmentKind,
    *,
    evaluation: Evaluation | None,
    onnx: OnnxFacts | None,
    steps: int | None,
    license: str,
) -> str:
    """Markdown, with the front matter that model hubs read. `steps`: of the environments, until these weights."""
    config, game = folder.config, info.environment.id
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "ape-x", json.dumps(game)]
    lines = ["---", f"license: {license}", "library_name: pytorch", f"tags: [{', '.join(tags)}]", "---", ""]
    lines += [f"# Ape-X on {game}", ""]
    lines += ["A Q-network, greedy by its largest output, trained by distributed prioritized experience replay"]
    lines += ["([Horgan et al. 2018](https://arxiv.org/abs/1803.00933)).", ""]
    lines += ["| | |", "|---|---|", *_facts(folder, info, evaluation, steps, license)]
    lines += ["", "## What it takes and gives", "", *_interface(info, kind), ""]
    lines += [
        "## Loading it with torch alone",
        "",
        _loading(info),
        "",
        "```python",
        load_code(info).rstrip(),
        "```",
        "",
    ]
    lines += ["The action is `q_values(observation).argmax(1)`.", ""]
    if onnx is not None:
        lines += ["## ONNX", "", *_onnx(onnx), ""]
    lines += ["## Configuration", "", *_differing(config)]
    return "\n".join(lines) + "\n"


def load_code(info: PolicyInfo) -> str:
    """The lines of plain torch that define `q_values` from model.safetensors."""
    schema = info.schema
    dims = schema.observation_shape if schema.frame_dtype == "uint8" or info.network.factory else schema.frame_shape
    facts = {"shape": f"[batch, {', '.join(map(str, dims))}]", "num_actions": schema.num_actions}
    if info.network.factory:
        module, _, name = info.network.factory.partition(":")
        return CUSTOM.format(module=module, name=name, schema=schema.to_dict(), dtype=schema.frame_dtype, **facts)
    body = IMAGE_BODY if len(schema.frame_shape) == 2 else VECTOR_BODY
    return LINEAR + body.format(**facts) + (DUELING_HEADS if info.network.dueling else ONE_HEAD)


def _facts(
    folder: RunFolder, info: PolicyInfo, evaluation: Evaluation | None, steps: int | None, license: str
) -> list[str]:
    """Rows of a table."""
    config, manifest = folder.config, folder.manifest
    git, hardware, versions = manifest.get("git"), manifest["hardware"], manifest["versions"]
    gpus = f", {', '.join(hardware['gpus'])}" if hardware["gpus"] else ", no GPU"
    commit = "not known" if git is None else f"`{git['commit']}`{', with changes' if git['dirty'] else ''}"
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
        "Licence": f"{license}, of the weights; the program that trained them is under the MIT licence",
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def _score(info: PolicyInfo, config: Config, evaluation: Evaluation | None) -> str:
    """The score and how it was measured."""
    if evaluation is not None:
        bounds = evaluation.interval
        interval = "" if bounds is None else ", 95 % interval {:.2f} ... {:.2f}".format(*bounds)
        return (
            f"mean {evaluation.mean:.2f}, median {evaluation.median:.2f} over {evaluation.episodes} full games"
            f"{interval}; raw rewards, epsilon {evaluation.epsilon:g}, seed {evaluation.seed}: `apex evaluate`, "
            "on games of seeds that training does not draw"
        )
    if info.score is None:
        return "not measured"
    games, epsilon = "full games", config.evaluator.epsilon
    if info.games is not None:
        games, epsilon = f"{info.games.episodes} full games", info.games.epsilon
    return (
        f"mean {info.score:.2f} over {games} by the run's evaluator; raw rewards, epsilon {epsilon:g}. It was chosen "
        "as the best of the run's evaluations, which makes such a mean too high: `apex export --episodes 30` measures "
        "it anew"
    )


def _interface(info: PolicyInfo, kind: EnvironmentKind) -> list[str]:
    schema, environment = info.schema, info.environment
    return [
        *(f"- {line}" for line in _preprocessing(info, kind, environment)),
        "- No mean, no variance and no other running statistic is applied to observations or rewards.",
        f"- Output: float32 [batch, {schema.num_actions}], one Q-value per action 0 ... {schema.num_actions - 1}"
        + (" of Atari's whole action set." if environment.full_action_space else ".")
        + (" Dueling heads: Q = V + A - mean A." if info.network.dueling and not info.network.factory else ""),
        "- Q-values are discounted sums of the rewards that were learned from"
        + (", clipped to -1 ... 1: they are no scores." if environment.clip_rewards else "."),
    ]


def _preprocessing(info: PolicyInfo, kind: EnvironmentKind, environment: EnvironmentConfig) -> list[str]:
    schema = info.schema
    if kind == "vector":
        (size,) = schema.frame_shape
        return [
            f"Input: float32 [batch, {size}], the environment's own observation, flattened as "
            "`gymnasium.spaces.flatten` does (a Discrete is one-hot), as it is."
        ]
    side, stack = environment.image_size, environment.frame_stack
    lines = [
        f"Input: uint8 [batch, {stack}, {side}, {side}], 0 ... 255, the last {stack} frames, the newest last; before "
        "the first frame of an episode there are zeros. The network divides by 255."
    ]
    if kind == "image":
        gray = "Frames: gray (OpenCV's RGB2GRAY)"
        return [*lines, f"{gray}, resized to {side} x {side} by INTER_AREA where they are not so large."]
    fire = "FIRE where the game waits for it"
    if environment.fire_after_life_loss:
        fire += ", and in the place of the one action after a lost life"
    start = f"an episode begins with 0 ... {environment.noop_max - 1} no-ops" if environment.noop_max else "no no-ops"
    return [
        *lines,
        f"Frames: the maximum of the last two of every {environment.frame_skip} of the emulator, gray, area-resized "
        f"to {side} x {side}: ALE's own vector environment.",
        f"Sticky actions {environment.sticky_actions:g}; {start}; {fire}; an episode is "
        f"a full game of at most {environment.max_episode_frames:,} emulator frames.",
        f"Actions: {'all 18 of the console' if environment.full_action_space else 'the minimal set of the game'}.",
    ]


def _loading(info: PolicyInfo) -> str:
    if not info.network.factory:
        return "`pip install torch safetensors`; the tensors are float32."
    module = info.network.factory.partition(":")[0]
    return f"The network is one of its author's own: the module `{module}` is needed, and is not part of this export."


def _onnx(onnx: OnnxFacts) -> list[str]:
    actions = "all greedy actions agree"
    if onnx.num_differing:
        actions = f"{onnx.num_differing} greedy actions differ, where two Q-values are as good as equal"
    return [
        f"`model.onnx`, opset {onnx.opset}: input `observation` as above, any batch; output `q`. Compared with torch "
        f"by onnxruntime {onnx.runtime} on {onnx.num_observations} random observations: the largest absolute "
        f"difference of a Q-value is {onnx.difference:.1e}, and {actions}.",
        "",
        "```python",
        "import onnxruntime",
        "",
        'session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])',
        '(q,) = session.run(["q"], {"observation": observation})  # a NumPy array',
        "```",
    ]


def _differing(config: Config) -> list[str]:
    lines = ["What differs from the defaults, which are the paper's where it gives a value; `config.json` has all.", ""]
    lines += ["| setting | value | default |", "|---|---|---|"]
    changes = [change for change in find_changes(config) if not change.name.startswith(NOT_SHOWN)]
    return lines + [f"| {change.name} | {change.value} | {change.default} |" for change in changes]
