"""`apex export`: what others load by torch or onnxruntime alone acts as the run's policy does; the card is true."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.policy_runs import make_run
from torch import nn

from apex import UsageError, export, load_policy
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EnvironmentConfig, NetworkConfig, RunConfig
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.errors import ExportError
from apex.evaluation.export.command import main, to_onnx
from apex.runs.checkpoints.policy_file import BEST, PlayedGames, PolicyInfo, save_policy
from apex.runs.checkpoints.policy_file import read_policy as load_policy_file
from apex.runs.folder import RunFolder

SMALL = NetworkConfig(width=0.5, hidden=32, body_hidden=16)
PONG = EnvironmentConfig(id="ALE/Pong-v5", image_size=44)
CARTPOLE = EnvironmentConfig(id="CartPole-v1", clip_rewards=False)
OWN = NetworkConfig(factory=f"{__name__}:make_own")


def make_own(schema):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.observation_shape), schema.num_actions))


def make_narrow(schema):
    return Narrow(schema.frame_shape[0], schema.num_actions)


class Narrow(nn.Module):
    """Answers a batch of five as no other: what the exporter traces is one of two."""

    def __init__(self, num_values, num_actions):
        super().__init__()
        self.layer = nn.Linear(num_values, num_actions)

    def forward(self, observation):
        q = self.layer(observation[:, 0])
        return q + 1 if len(q) == 5 else q


def make_trained(folder, environment, network=SMALL, *, name="mine", score=9.0, **branches):
    """A run whose best policy has made 70 updates; its actions differ from one observation to the next."""
    config = Config(
        environment=environment, network=network, run=RunConfig(name=name, folder=str(folder), stop_score=400.0)
    )
    config = replace(config, **branches)
    schema = describe(environment, config.actor.n_step)
    run = RunFolder.create(config, schema, argv=[])
    module = make_network(network, schema, seed=5)
    if not network.factory:
        with torch.no_grad():
            module.advantage.output.bias -= module(torch.from_numpy(observations(schema))).mean(0)
    info = PolicyInfo(schema=schema, config=config, num_updates=70, score=score)
    save_policy(run.checkpoints / BEST, flatten_parameters(module), info)
    return run


def observations(schema, size=64):
    rng = np.random.default_rng(1)
    if schema.frame_dtype == "uint8":
        return rng.integers(256, size=(size, *schema.observation_shape), dtype=np.uint8)
    return rng.standard_normal((size, *schema.observation_shape), dtype=np.float32)


def blocks(text):
    """The Python in a Markdown text that defines `q_values` from a file of weights."""
    return [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "load_file" in code]


# --- by torch alone -------------------------------------------------------------------------------------------------

STRANGER = """
import importlib.abc, json, os, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        assert name.partition(".")[0] != "apex", "apex was imported"

sys.meta_path.insert(0, Blocker())
import numpy, torch
for folder, code in json.load(sys.stdin):
    os.chdir(folder)
    sys.path.insert(0, os.path.join(folder, "modules"))
    names = {}
    exec(code, names)
    observation = torch.from_numpy(numpy.load("observations.npy"))
    print(*names["q_values"](observation).argmax(1).tolist())
"""
OWN_SOURCE = """
import math
from torch import nn

def make_own(schema):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.observation_shape), schema.num_actions))
"""


def test_the_lines_of_the_cards_act_as_the_policy_does_without_apex(tmp_path):
    runs = {
        "pong": make_trained(tmp_path, PONG, name="pong"),
        "one-head": make_trained(tmp_path, PONG, replace(SMALL, dueling=False), name="one-head"),
        "cartpole": make_trained(tmp_path, CARTPOLE, name="cartpole"),
        "plain": make_trained(tmp_path, CARTPOLE, replace(SMALL, dueling=False), name="plain"),
        "own": make_trained(tmp_path, CARTPOLE, OWN, name="own"),
    }
    tasks, expected = [], []
    for name, run in runs.items():
        out = export(run.path)
        policy = load_policy(run.path)
        seen = observations(run.schema)
        is_vector = run.schema.frame_dtype == "float32"
        np.save(out / "observations.npy", seen[:, 0] if is_vector and name != "own" else seen)
        (code,) = blocks((out / "README.md").read_text())
        tasks.append((str(out), code))
        expected.append(policy(seen).tolist())
        assert len(set(policy(seen).tolist())) > 1
        if name != "own":
            assert len([line for line in code.splitlines() if line.strip()]) <= 12
    module = (tmp_path / "own" / "export" / "modules").joinpath(*__name__.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text(OWN_SOURCE)
    answer = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER], input=json.dumps(tasks), capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stderr
    assert [[int(word) for word in line.split()] for line in answer.stdout.splitlines()] == expected
    assert len(expected) == 5


@pytest.mark.parametrize(
    ("environment", "network", "names"),
    [
        (
            PONG,
            SMALL,
            "advantage.hidden advantage.output conv1 conv2 conv3 value.hidden value.output",
        ),
        (CARTPOLE, SMALL, "advantage.hidden advantage.output linear1 linear2 value.hidden value.output"),
        (CARTPOLE, replace(SMALL, dueling=False), "linear1 linear2 q.hidden q.output"),
        (CARTPOLE, OWN, "1"),
    ],
)
def test_tensors_are_float32_and_called_by_their_layers(tmp_path, environment, network, names):
    out = export(make_trained(tmp_path, environment, network).path, tmp_path / "out")
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    assert sorted(tensors) == sorted(f"{name}.{leaf}" for name in names.split() for leaf in ("weight", "bias"))
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}


def test_apex_loads_what_it_exported(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    policy, again = load_policy(run.path), load_policy(export(run.path) / "model.safetensors")
    assert again.info == policy.info
    assert (again.q_values(observations(run.schema)) == policy.q_values(observations(run.schema))).all()


# --- the card -------------------------------------------------------------------------------------------------------


def card_of(run, **options):
    return (export(run.path, **options) / "README.md").read_text()


def test_the_card_says_what_it_is_how_good_and_how_it_came_about(tmp_path):
    run = make_trained(tmp_path, PONG)
    run.elapsed_seconds = 3_723.0
    rows = [{"steps": 100 * n, "scalars": {"learner/updates": 20 * n}} for n in range(1, 9)]
    (run.curves / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = card_of(run, license="cc0-1.0")
    for words in (
        "license: cc0-1.0\n",
        "| Environment | ALE/Pong-v5 |",
        "| Score | mean 9.00 over full games by the run's evaluator; raw rewards, epsilon 0.001. This is the best",
        "70 updates of batches of 512, after about 400 environment steps; seed 1",
        "| Wall clock | 1:02:03 for the whole run |",
        "| Licence | weights: cc0-1.0;",
        "uint8 [batch, 4, 44, 44], 0 ... 255: the last 4 frames, the newest last",
        "The network divides by 255.",
        "Sticky actions 0; an episode begins with 0 ... 29 no-ops",
        "Actions: the minimal set of the game.",
        "No mean, no variance and no other running statistic",
        "one Q-value per action 0 ... 5. Dueling heads: Q = V + A - mean(A).",
        "clipped to -1 ... 1; they are not scores",
        "| environment.image_size | 44 | 84 |",
        "| network.width | 0.5 | 1.0 |",
    ):
        assert words in card
    git = run.manifest["git"]
    assert ("commit not known" if git is None else f"commit `{git['commit']}`") in card
    assert "run.folder" not in card  # Where it was is nobody's business.
    assert "ONNX" not in card


def test_the_card_says_how_many_games_the_evaluator_played(tmp_path):
    run = make_trained(tmp_path, CARTPOLE, score=None)
    assert "| Score | not measured |" in card_of(run)
    info, agent = load_policy_file(run.checkpoints / BEST)
    games = PlayedGames(seed=3, episodes=100, num_envs=5, epsilon=0.001)
    save_policy(run.checkpoints / BEST, flatten_parameters(agent.network), replace(info, score=450.0, games=games))
    assert "mean 450.00 over 100 full games by" in card_of(run)


def test_games_may_be_played_for_the_card(tmp_path):
    card = card_of(make_run(tmp_path, best=70), episodes=2)
    said = re.search(
        r"\| Score \| mean ([\d.]+), median [\d.]+ over 2 full games, 95 % interval .* `apex evaluate --seed 0`", card
    )
    assert 8 <= float(said[1]) <= 11  # It always pushes one way.


def test_a_checkpoint_knows_its_steps_itself(tmp_path):
    assert "90 updates of batches of 512, after about 0 environment steps" in card_of(make_run(tmp_path, last=[90]))


def test_a_network_of_ones_own_is_named_as_needed(tmp_path):
    card = card_of(make_trained(tmp_path, CARTPOLE, OWN))
    assert f"needs the module `{__name__}`, which is not part of this export" in card
    assert f"from {__name__} import make_own" in card
    assert "Dueling" not in card


def test_the_configuration_is_there_for_programs(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    fields = json.loads((export(run.path) / "config.json").read_text())
    assert fields["schema"]["num_actions"] == 2
    assert (fields["num_updates"], fields["score"]) == (70, 9.0)
    assert fields["network"] == fields["config"]["network"]
    assert fields["config"]["learner"]["batch_size"] == 512


# --- ONNX -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [PONG, CARTPOLE])
def test_onnx_is_compared_with_torch_and_the_card_says_by_how_much_it_differs(tmp_path, environment):
    import onnxruntime

    run = make_trained(tmp_path, environment)
    out = export(run.path, onnx=True)
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    for size in (1, 33):
        seen = observations(run.schema, size)
        (q,) = session.run(["q"], {"observation": seen})
        assert q == pytest.approx(load_policy(run.path).q_values(seen), abs=1e-5)
    card = (out / "README.md").read_text()
    said = re.search(r"differs from that of PyTorch by at most (\S+), and all greedy actions agree", card)
    assert 0 <= float(said[1]) < 1e-5
    export(run.path)
    assert not (out / "model.onnx").exists()  # It would be of another export.


def test_a_network_that_onnx_cannot_express_is_refused(tmp_path, capsys):
    run = make_trained(tmp_path, CARTPOLE, NetworkConfig(factory=f"{__name__}:make_narrow"))
    with pytest.raises(ExportError, match="differ from torch by 1 for a batch of 5"):
        to_onnx(load_policy(run.path).network, run.schema)
    assert main([str(run.path), "--onnx"]) == 1
    assert "apex export: the outputs of the ONNX network differ" in capsys.readouterr().err
    assert not (run.path / "export").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path, capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([str(make_trained(tmp_path, CARTPOLE).path), "--onnx"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("apex export: --onnx needs onnx and onnxruntime, which are not installed")
    assert "-m pip install onnx onnxruntime" in said


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_what_it_wrote(tmp_path, capsys):
    run = make_trained(tmp_path, CARTPOLE)
    assert main([str(run.path), "--out", str(tmp_path / "out")]) == 0
    names = ["README.md", "config.json", "model.safetensors"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out" / name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["mine", "--checkpoint", "lost"], "must be best, last or a path, got 'lost'"),
        (["mine", "--episodes", "-1"], "--episodes: must be an integer of at least 0, got -1"),
        (["mine", "--episodes", "many"], "argument --episodes"),
        (["mine", "--license", ""], "license must be a name such as mit, got ''"),
        (["mine", "--out", "/proc/nowhere"], "cannot write to /proc/nowhere"),
    ],
)
def test_a_mistake_ends_with_a_sentence_and_status_2(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    make_trained("runs", CARTPOLE)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_policy_has_no_weights(tmp_path):
    with pytest.raises(UsageError, match="neither a best policy nor a checkpoint yet"):
        export(make_run(tmp_path).path)
