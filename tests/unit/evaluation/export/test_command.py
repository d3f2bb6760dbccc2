"""Tests of `apex export`: weights, code and ONNX without apex act as the policy; contents of the card."""

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
from apex.types import RunTime
from apexreplay.files.atomic_files import replace_file, seal

SMALL = NetworkConfig(width=0.5, hidden=32, body_hidden=16)
PONG = EnvironmentConfig(id="ALE/Pong-v5", image_size=44)
CARTPOLE = EnvironmentConfig(id="CartPole-v1", clip_rewards=False)
OWN = NetworkConfig(factory=f"{__name__}:make_own")


def make_own(schema):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.observation_shape), schema.num_actions))


def make_narrow(schema):
    return Narrow(schema.frame_shape[0], schema.num_actions)


class Narrow(nn.Module):
    """Returns other outputs for a batch of five, a branch that the exporter does not trace."""

    def __init__(self, num_values, num_actions):
        super().__init__()
        self.layer = nn.Linear(num_values, num_actions)

    def forward(self, observation):
        q = self.layer(observation[:, 0])
        return q + 1 if len(q) == 5 else q


def test_files_of_something_else_are_not_replaced(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    out = tmp_path / "project"
    out.mkdir()
    (out / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"README\.md.*--out"):
        export(run.path, out)
    assert [path.read_text() for path in out.iterdir()] == ["mine"]


def make_trained(folder, environment, network=SMALL, *, name="mine", score=9.0, **branches):
    """A run whose best policy has made 70 updates; its actions depend on the observations."""
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
    """The Python blocks of a Markdown text that load a file of weights."""
    return [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "load_file" in code]


# --- weights --------------------------------------------------------------------------------------------------------

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


def test_code_of_the_card_acts_as_the_policy_without_apex(tmp_path):
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
        expected.append(policy.act(seen).tolist())
        assert len(set(policy.act(seen).tolist())) > 1
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
        (PONG, SMALL, "advantage.hidden advantage.output conv1 conv2 conv3 value.hidden value.output"),
        (CARTPOLE, SMALL, "advantage.hidden advantage.output linear1 linear2 value.hidden value.output"),
        (CARTPOLE, replace(SMALL, dueling=False), "linear1 linear2 q.hidden q.output"),
        (CARTPOLE, OWN, "1"),
    ],
)
def test_tensors_are_float32_and_named_by_layer(tmp_path, environment, network, names):
    out = export(make_trained(tmp_path, environment, network).path, tmp_path / "out")
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    assert sorted(tensors) == sorted(f"{name}.{leaf}" for name in names.split() for leaf in ("weight", "bias"))
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}


def test_exported_policy_can_be_loaded(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    policy, again = load_policy(run.path), load_policy(export(run.path) / "model.safetensors")
    assert again.info == policy.info
    assert (again.q_values(observations(run.schema)) == policy.q_values(observations(run.schema))).all()


def card_of(run, **options):
    return (export(run.path, **options) / "README.md").read_text()


def test_card_has_training_score_interface_and_settings(tmp_path):
    run = make_trained(tmp_path, PONG)
    run.run_time = RunTime(3_723.0)
    rows = [{"steps": 100 * n, "scalars": {"learner/updates": 20 * n}} for n in range(1, 9)]
    (run.curves / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = card_of(run, license="cc0-1.0")
    rows = dict(re.findall(r"^\| (\w+(?: \w+)?) \| (.*) \|$", card, re.MULTILINE))
    assert rows["Environment"] == "ALE/Pong-v5"
    for row, values in {
        "Score": ["mean 9.00", "epsilon 0.001", "biased"],
        "Trained": ["70 updates", "batches of 512", "400 environment steps", "seed 1"],
        "Wall clock": ["1:02:03"],
        "Licence": ["cc0-1.0"],
    }.items():
        assert all(value in rows[row] for value in values), row
    for text in (
        "license: cc0-1.0\n",
        "uint8 [batch, 4, 44, 44]",
        "divides by 255",
        "Sticky actions 0;",
        "0 ... 29 no-ops",
        "minimal set",
        "float32 [batch, 6]",
        "Q = V + A",
        "-1 ... 1;",
        "| environment.image_size | 44 | none |",
        "| network.width | 0.5 | 1.0 |",
    ):
        assert text in card, text
    git = run.manifest["git"]
    assert ("commit not known" if git is None else f"commit {git['commit']}") in card
    assert "run.folder" not in card  # Paths of the machine are not published.
    assert "ONNX" not in card


def test_text_of_a_foreign_manifest_is_no_markup_on_the_card(tmp_path):
    run, text = make_trained(tmp_path, CARTPOLE), "<b>|[a](http://b)`\n# c"
    run.manifest["hardware"]["cpu"] = run.manifest["versions"]["torch"] = text
    run.manifest["git"] = {"commit": text, "dirty": False}
    run.manifest["config"]["environment"]["args"] = {"x": text}
    replace_file(run.path / "manifest.json", seal(run.manifest))
    card = card_of(run)
    assert card.count(r"\<b\>\|\[a\](http://b)\` # c") == 3
    assert len(re.findall(r"\\<b\\>\\\|\\\[a\\\]\(http", card)) == 4
    assert len(re.findall("<b>", card)) == 0


def test_card_has_the_number_of_games_of_the_evaluator(tmp_path):
    run = make_trained(tmp_path, CARTPOLE, score=None)
    assert "| Score | not measured |" in card_of(run)
    info, agent = load_policy_file(run.checkpoints / BEST)
    games = PlayedGames(seed=3, episodes=100, num_envs=5, epsilon=0.001)
    save_policy(run.checkpoints / BEST, flatten_parameters(agent.network), replace(info, score=450.0, games=games))
    assert "mean 450.00 over 100 full" in card_of(run)


def test_card_has_the_score_of_games_played_for_it(tmp_path):
    card = card_of(make_run(tmp_path, best=70), episodes=2)
    found = re.search(r"\| Score \| mean ([\d.]+), median [\d.]+ over 2 .*95 % interval .*--seed 0", card)
    assert 8 <= float(found[1]) <= 11  # The policy always pushes in one direction.


def test_card_has_the_steps_of_a_checkpoint(tmp_path):
    assert re.search(r"90 updates .*\b0 environment steps", card_of(make_run(tmp_path, last=[90])))


def test_card_names_the_module_of_a_custom_network(tmp_path):
    card = card_of(make_trained(tmp_path, CARTPOLE, OWN))
    assert f"module `{__name__}`" in card
    assert f"from {__name__} import make_own" in card
    assert "Dueling" not in card


def test_a_policy_without_an_update_is_exported_with_a_warning(tmp_path, caplog):
    for updates in (0, 70):
        run = make_run(tmp_path / str(updates), best=updates)
        caplog.clear()
        export(run.path)
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [str(run.path) in record.getMessage() for record in warned] == [True] * (updates == 0)


def test_configuration_is_exported_as_json(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    fields = json.loads((export(run.path) / "config.json").read_text())
    assert fields["schema"]["num_actions"] == 2
    assert (fields["num_updates"], fields["score"]) == (70, 9.0)
    assert fields["network"] == fields["config"]["network"]
    assert fields["config"]["learner"]["batch_size"] == 512


@pytest.mark.parametrize("environment", [PONG, CARTPOLE])
def test_onnx_equals_torch_and_the_card_has_the_difference(tmp_path, environment):
    import onnxruntime

    run = make_trained(tmp_path, environment)
    out = export(run.path, onnx=True)
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    for size in (1, 33):
        seen = observations(run.schema, size)
        (q,) = session.run(["q"], {"observation": seen})
        assert q == pytest.approx(load_policy(run.path).q_values(seen), abs=1e-5)
    card = (out / "README.md").read_text()
    found = re.search(r"PyTorch by at most (\S+), and all greedy", card)
    assert 0 <= float(found[1]) < 1e-5
    export(run.path)
    assert not (out / "model.onnx").exists()  # The file of the earlier export is removed.


def test_network_that_onnx_cannot_express_is_refused(tmp_path, capsys):
    run = make_trained(tmp_path, CARTPOLE, NetworkConfig(factory=f"{__name__}:make_narrow"))
    with pytest.raises(ExportError, match=r"torch by 1 for .*\b5\b") as error:
        to_onnx(load_policy(run.path).network, run.schema)
    assert error.value.remedy
    assert main([str(run.path), "--onnx"]) == 1
    assert str(error.value) in capsys.readouterr().err
    assert not (run.path / "export").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([str(make_trained(tmp_path, CARTPOLE).path), "--onnx"]) == 2
    error = capsys.readouterr().err
    assert missing in error
    assert "-m pip install onnx onnxruntime" in error


def test_command_prints_the_files_it_wrote(tmp_path, capsys):
    run = make_trained(tmp_path, CARTPOLE)
    assert main([str(run.path), "--out", str(tmp_path / "out")]) == 0
    names = ["README.md", "config.json", "model.safetensors"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out" / name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["nowhere"], ["nowhere"]),
        (["mine", "--checkpoint", "lost"], ["--checkpoint", "'lost'"]),
        (["mine", "--episodes", "-1"], ["--episodes", "-1"]),
        (["mine", "--episodes", "many"], ["--episodes", "many"]),
        (["mine", "--license", ""], ["license", "''"]),
        (["mine", "--out", "/proc/nowhere"], ["/proc/nowhere", "--out"]),
    ],
)
def test_invalid_argument_is_refused_with_its_name_and_value(tmp_path, capsys, monkeypatch, arguments, names):
    monkeypatch.chdir(tmp_path)
    make_trained("runs", CARTPOLE)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in names)


def test_a_planted_link_leads_no_file_to_another_folder(tmp_path):
    run = make_trained(tmp_path, CARTPOLE)
    (tmp_path / "precious").mkdir()
    (run.path / "export").symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="mine/export"):
        export(run.path)
    assert not list((tmp_path / "precious").iterdir())


def test_run_without_a_policy_is_refused(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(UsageError, match=str(run.path)) as error:
        export(run.path)
    assert error.value.remedy
