"""A warm start copies the tensors that fit, names the others, and refuses policies of which none fits."""

import dataclasses

import pytest
import torch
from support.policy_runs import NETWORK, make_run

from apex.config import Config, EnvironmentConfig
from apex.dqn.networks import make_network
from apex.launch.preflight.warm_start import find_warm_start
from apex.learning.setup import make_trainer
from apex.learning.warm_start import start_warm
from apex.runs.folder import RunFolder
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop

OF_HEADS = (  # the tensors whose shapes depend on `network.hidden`, in the order of the state dict
    *("advantage.hidden.weight", "advantage.hidden.bias", "advantage.output.weight"),
    *("value.hidden.weight", "value.hidden.bias", "value.output.weight"),
)


class NoBatches:
    memory = None

    def release(self, slot):
        pass


def make_warm(run, tmp_path, *, name="warm", **changes):
    """A new run that starts from `run`."""
    config = run.config
    learner = dataclasses.replace(config.learner, init_from=str(run.path), device="cpu", num_threads=1)
    config = dataclasses.replace(
        config, learner=learner, run=dataclasses.replace(config.run, name=name, folder=str(tmp_path)), **changes
    )
    return RunFolder.create(config, run.schema, argv=[])


def test_a_new_run_starts_both_networks_from_the_best_policy(tmp_path):
    folder = make_warm(make_run(tmp_path, best=7), tmp_path)
    trainer = make_trainer(folder, torch.device("cpu"), NoBatches(), None, publish=lambda parameters: None)
    for network in (trainer.online, trainer.target):
        state = network.state_dict()
        assert state.pop("advantage.output.bias").tolist() == [0.0, 1.0]
        assert not any(tensor.any() for tensor in state.values())


def test_a_run_that_has_saved_does_not_start_again(tmp_path):
    folder = make_warm(make_run(tmp_path, best=7), tmp_path)
    folder.note_saved()
    trainer = make_trainer(folder, torch.device("cpu"), NoBatches(), None, publish=lambda parameters: None)
    assert trainer.online.state_dict()["body.1.weight"].any()  # The weights of the policy are 0.


def test_tensors_of_another_shape_are_named_and_stay(tmp_path):
    run = make_run(tmp_path, last=[9])
    wider = make_network(dataclasses.replace(NETWORK, hidden=5), run.schema, seed=1)
    before = {name: tensor.clone() for name, tensor in wider.state_dict().items()}
    found = start_warm(wider, str(run.path))
    assert (found.path, found.updates) == (str(run.checkpoints / "000000009"), 9)
    assert found.copied + len(found.others) == len(before)
    assert found.others == OF_HEADS
    after = wider.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in found.others)
    assert not any(after[name].any() for name in before if name not in found.others and not name.endswith("bias"))


def test_a_missing_or_unfitting_policy_is_refused_by_name(tmp_path):
    run = make_run(tmp_path, best=7)
    with pytest.raises(UsageError) as refused:
        start_warm(torch.nn.Linear(3, 3), str(run.path))
    assert f"learner.init_from {str(run.path)!r}" in refused.value.problem
    with pytest.raises(UsageError) as refused:
        start_warm(torch.nn.Linear(3, 3), str(tmp_path / "nothere"))
    assert "learner.init_from" in refused.value.problem
    (run.checkpoints / "best.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="init_from"):
        start_warm(torch.nn.Linear(3, 3), str(run.path))


@pytest.mark.programs
def test_the_launcher_reports_what_a_run_will_start_from(tmp_path):
    run = make_run(tmp_path, best=7)
    folder = make_warm(run, tmp_path)
    found = find_warm_start(folder.config, folder.schema, Stop())
    assert (found.updates, found.copied, found.others) == (7, 12, ())
    other = dataclasses.replace(folder.config.learner, freeze="body")
    assert find_warm_start(dataclasses.replace(folder.config, learner=other), folder.schema, Stop()) == found
    other = dataclasses.replace(folder.config.learner, init_from=str(tmp_path / "nothere"))
    with pytest.raises(UsageError, match="init_from"):
        find_warm_start(dataclasses.replace(folder.config, learner=other), folder.schema, Stop())
    other = dataclasses.replace(folder.config.learner, init_from=str(tmp_path / "nothere"), freeze="torso")
    for learner in (other, dataclasses.replace(other, init_from="")):
        with pytest.raises(UsageError, match="torso"):
            find_warm_start(dataclasses.replace(folder.config, learner=learner), folder.schema, Stop())
    assert find_warm_start(Config(environment=EnvironmentConfig(id="CartPole-v1")), run.schema, Stop()) is None
