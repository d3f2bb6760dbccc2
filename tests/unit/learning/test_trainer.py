"""Tests the order of the trainer's actions, its results, its checkpoints and its skipped updates."""

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.trainers import NETWORK, SCHEMA, B, Tape, make_batch, make_trainer

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.graph_update import GraphUpdate
from apex.algorithms.losses import importance_weights
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, LearnerConfig
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.networks import make_network
from apex.learning.loop import describe_training
from apex.learning.skipped_batches import MAX_FILES, SkippedBatches
from apex.learning.trainer import COLLECT_SECONDS, Trainer
from apex.runs.checkpoints.checkpoint import LearnerState, load_checkpoint, save_checkpoint
from apex.types import Progress


def test_parameters_are_published_first_and_every_period():
    tape = Tape(*(make_batch(number) for number in range(4)))
    trainer = make_trainer(tape, publish_period=2)
    trainer.publish_newest()
    assert [trainer.step(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert tape.events == [
        "publish 0",
        "priorities 0",
        "release 0",
        "priorities 1",
        "release 1",
        "publish 2",
        "priorities 2",
        "release 2",
        "priorities 3",
        "release 0",
        "publish 4",
    ]


def test_newest_parameters_are_published_after_the_pause():
    """At most every second update, and at most every 10 s."""
    tape = Tape(*(make_batch(number) for number in range(7)))
    now = 0.0
    trainer = make_trainer(tape, clock=lambda: now, publish_period=2, publish_seconds=10.0)
    trainer.publish_newest()
    for now in (1.0, 9.0, 10.0, 11.0, 19.0, 20.5, 30.5):  # noqa: B007 - the clock reads it
        trainer.step(0.0)
    # Update 2 is too early, so 3 is published instead; after it, 4 and 5 are too early.
    assert [parameters.version for parameters in tape.published] == [0, 3, 6]


def test_target_network_is_in_evaluation_mode():
    class WithDropout(DqnAlgorithm):
        def make_network(self):
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))

    tape = Tape(make_batch(0))
    config = LearnerConfig(batch_size=B, optimizer="adam")
    algorithm = WithDropout(Config(learner=config), SCHEMA)
    trainer = Trainer(
        config, algorithm, device=torch.device("cpu"), batches=tape, priorities=tape, publish=tape.publish
    )
    assert trainer.step(0.0)
    assert [network.training for network in (trainer.online, trainer.target)] == [True, False]


def test_priorities_are_the_td_errors_of_the_keys():
    """Compares with the definition, at the parameters before the update."""
    batch = make_batch(0)
    tape = Tape(batch)
    trainer = make_trainer(tape)
    network = make_network(NETWORK, SCHEMA, seed=1)
    with torch.no_grad():
        q, next_q = (network(torch.from_numpy(stack)).numpy() for stack in batch.stacks)
    expected = np.abs(batch.n_step_return + batch.discount * next_q.max(1) - q[np.arange(B), batch.action])
    trainer.step(0.0)
    (update,) = tape.updates
    assert (update.shard, update.store_incarnation, update.sampler, update.number) == (0, 5, 1, 0)
    np.testing.assert_array_equal(update.keys, batch.keys)
    np.testing.assert_allclose(update.priorities, expected, rtol=1e-5)


def test_loss_is_the_weighted_mean():
    batch = make_batch(0)
    tape = Tape(batch)
    trainer = make_trainer(tape)
    trainer.step(0.0)
    weights = importance_weights(batch.probability, 1000, 0.4)
    expected = float((weights * 0.5 * tape.updates[0].priorities ** 2).mean())
    assert float(trainer.figures["loss"]) == pytest.approx(expected, rel=1e-5)


def test_target_network_is_copied_every_period():
    tape = Tape(*(make_batch(number) for number in range(4)))
    trainer = make_trainer(tape, target_period=3)
    start = flatten_parameters(trainer.target)
    trainer.step(0.0)
    trainer.step(0.0)
    np.testing.assert_array_equal(flatten_parameters(trainer.target), start)
    trainer.step(0.0)
    np.testing.assert_array_equal(flatten_parameters(trainer.target), flatten_parameters(trainer.online))
    trainer.step(0.0)
    assert (flatten_parameters(trainer.target) != flatten_parameters(trainer.online)).any()


def test_target_network_follows_by_a_share():
    trainer = make_trainer(Tape(*(make_batch(number) for number in range(4))), target_period=2, target_share=0.25)
    expected = flatten_parameters(trainer.target)
    for number in range(1, 5):
        trainer.step(0.0)
        if number % 2 == 0:
            expected = expected + np.float32(0.25) * (flatten_parameters(trainer.online) - expected)
        np.testing.assert_allclose(flatten_parameters(trainer.target), expected, rtol=1e-6, atol=1e-7)


def test_published_parameters_do_not_change_with_the_next_update():
    tape = Tape(make_batch(0), make_batch(1))
    trainer = make_trainer(tape, publish_period=1)
    trainer.step(0.0)
    before = tape.published[0].values.copy()
    trainer.step(0.0)
    np.testing.assert_array_equal(tape.published[0].values, before)
    assert (tape.published[1].values != before).any()


def test_parameters_are_published_when_their_copy_arrives():
    """As on a GPU: here the copy arrives after the next update."""
    tape = Tape(make_batch(0), make_batch(1))
    trainer = make_trainer(tape, publish_period=1)
    fetched = []
    trainer._transfer.fetch = lambda tensor, receive: fetched.append(lambda: receive(tensor.numpy()))
    trainer.step(0.0)
    expected = flatten_parameters(trainer.online)
    trainer.step(0.0)
    assert tape.published == []
    fetched[0]()
    assert [parameters.version for parameters in tape.published] == [1]
    np.testing.assert_array_equal(tape.published[0].values, expected)


def test_nothing_is_published_before_the_update_is_ready():
    """Another thread would free pinned memory during the capture, which makes the capture fail."""
    tape = Tape(*(make_batch(number) for number in range(4)))
    trainer = make_trainer(tape, publish_period=1)
    trainer._update = GraphUpdate(trainer._update)
    for _ in range(3):
        trainer.step(0.0)
    assert not trainer.ready
    assert tape.published == []
    trainer._update._graphs[0, 0] = object(), None  # As if a capture had failed.
    trainer.step(0.0)
    assert [parameters.version for parameters in tape.published] == [4]


def test_policy_lag_is_learner_version_minus_acting_version():
    tape = Tape(*(make_batch(number) for number in range(6)))
    trainer = make_trainer(tape)
    for _ in range(6):
        trainer.step(0.0)
    assert trainer.policy_lag == 5 - 2  # The sixth update is made by version 5.


def test_gradients_are_clipped_to_the_norm():
    tape = Tape(make_batch(0))
    trainer = make_trainer(tape, max_gradient_norm=1e-3, optimizer="rmsprop")
    trainer.step(0.0)
    norm = torch.cat([p.grad.reshape(-1) for p in trainer.online.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert float(trainer.figures["gradient_norm"]) > 1e-3  # The reported norm is that before clipping.


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_restored_trainer_makes_the_same_updates(tmp_path, optimizer):
    batches = [make_batch(number) for number in range(6)]
    straight = make_trainer(Tape(*batches), optimizer=optimizer, target_period=2)
    for _ in range(6):
        straight.step(0.0)
    first = make_trainer(Tape(*batches[:3]), optimizer=optimizer, target_period=2)
    for _ in range(3):
        first.step(0.0)
    state = LearnerState(progress=Progress(42), config=Config(), schema=SCHEMA, **first.state())
    path = save_checkpoint(tmp_path, state)
    second = make_trainer(Tape(*batches[3:]), optimizer=optimizer, target_period=2)
    second.restore(load_checkpoint(path)._asdict())
    assert second.num_updates == 3
    for _ in range(3):
        second.step(0.0)
    np.testing.assert_array_equal(flatten_parameters(second.online), flatten_parameters(straight.online))
    np.testing.assert_array_equal(flatten_parameters(second.target), flatten_parameters(straight.target))


def test_bfloat16_agrees_with_float32():
    """bfloat16 has 8 bits of mantissa: each of three layers rounds by 2^-8, and differences cancel digits."""
    batches = [make_batch(0)]
    plain, fast = Tape(*batches), Tape(*batches)
    make_trainer(plain).step(0.0)
    make_trainer(fast, bfloat16="on").step(0.0)
    np.testing.assert_allclose(fast.updates[0].priorities, plain.updates[0].priorities, atol=0.05)
    assert not np.array_equal(fast.updates[0].priorities, plain.updates[0].priorities)  # bfloat16 was used.


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_restored_averages_have_the_parameters_memory_format(tmp_path, optimizer):
    """On a GPU, parameters have another memory format than in a file, and a fused step requires equal formats."""
    first, second = (make_trainer(Tape(make_batch(0)), optimizer=optimizer) for _ in range(2))
    for trainer in (first, second):
        for parameter in trainer.online.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.T.contiguous().T
    first.step(0.0)
    path = save_checkpoint(
        tmp_path, LearnerState(progress=Progress(1), config=Config(), schema=SCHEMA, **first.state())
    )
    second.restore(load_checkpoint(path)._asdict())
    strides = [parameter.stride() for parameter in second.online.parameters()]
    assert any(stride[0] == 1 < stride[1] for stride in strides if len(stride) == 2)
    for (parameter, values), expected in zip(
        second.optimizer.state.items(), first.optimizer.state.values(), strict=True
    ):
        averages = [name for name, value in values.items() if value.shape == parameter.shape]
        assert len(averages) == 2
        for name in averages:
            assert values[name].stride() == parameter.stride()
            assert torch.equal(values[name], expected[name])


def test_checkpoint_does_not_change_the_optimizers_settings():
    """A run may continue on a GPU, which needs `capturable`, and with another learning rate."""
    before = make_trainer(Tape(make_batch(0)))
    before.step(0.0)
    after = make_trainer(Tape(), learning_rate=0.5)
    (group,) = after.optimizer.param_groups
    group["capturable"] = True
    after.restore(before.state())
    (group,) = after.optimizer.param_groups
    assert (group["capturable"], group["fused"], group["lr"]) == (True, True, 0.5)
    assert [values["step"].item() for values in after.optimizer.state.values()] == [1.0] * len(group["params"])


def test_decaying_rate_continues_after_a_restore():
    settings = {"learning_rate": 0.4, "final_learning_rate_share": 0.25, "learning_rate_updates": 3}
    before = make_trainer(Tape(*map(make_batch, range(2))), **settings)
    rates = []

    def step(trainer):
        trainer.step(0.0)
        rates.append(trainer.optimizer.param_groups[0]["lr"])

    step(before)
    step(before)
    after = make_trainer(Tape(*map(make_batch, range(2, 5))), **settings)
    after.restore(before.state())
    for _ in range(3):
        step(after)
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])
    assert after.learning_rate == pytest.approx(0.1)


class SlowTransfer:
    """A device transfer whose results arrive at the third call of `collect`."""

    def __init__(self, tape):
        self.tape, self.pending, self.num_calls = tape, [], 0

    def load(self, batch, weights):
        return DeviceBatch(*(torch.from_numpy(array) for array in (*_arrays(batch), weights)))

    def give_back(self, batch, result):
        self.pending.append(batch)

    def collect(self):
        self.num_calls += 1
        if self.pending and self.num_calls >= 3:
            batch = self.pending.pop()
            self.tape.events.append(f"priorities {batch.parts[0].number}")
            self.tape.batches.append(make_batch(1))  # The credit was returned.
        return bool(self.pending)


def _arrays(batch):
    return batch.stacks, batch.action, batch.n_step_return, batch.discount


def test_results_are_sent_while_the_next_batch_is_awaited():
    """With one batch in flight, the next batch comes only after the priorities of the first were sent."""
    tape, timeouts = Tape(make_batch(0)), []
    receive = tape.receive
    tape.receive = lambda timeout: timeouts.append(timeout) or receive(timeout)
    trainer = make_trainer(tape)
    trainer._transfer = SlowTransfer(tape)
    assert trainer.step(0.0)
    assert trainer.step(60.0)
    assert tape.events == ["priorities 0"]
    assert max(timeouts[:-1]) <= COLLECT_SECONDS  # While results are pending, it checks often;
    assert timeouts[-1] > 50.0  # otherwise it waits for a batch only.


def test_step_returns_at_its_timeout_without_results():
    tape = Tape(make_batch(0))
    trainer = make_trainer(tape)
    trainer._transfer = SlowTransfer(tape)
    trainer._transfer.collect = lambda: True
    assert trainer.step(0.0)
    assert not trainer.step(0.01)


# --- skipped updates --------------------------------------------------------------------------------------------------


def spoiled(number, rows):
    batch = make_batch(number)
    batch.n_step_return[rows] = np.nan
    return batch


def test_skipped_update_changes_nothing_and_is_counted():
    tape = Tape(make_batch(0), spoiled(1, [3]), spoiled(2, [4]), make_batch(3))
    trainer, counts = make_trainer(tape), []
    for _ in range(4):
        before = flatten_parameters(trainer.online)
        trainer.step(0.0)
        changed = (flatten_parameters(trainer.online) != before).any()
        counts.append((bool(changed), trainer.num_skipped, trainer.num_skipped_in_row))
    assert counts == [(True, 0, 0), (False, 1, 1), (False, 2, 2), (True, 2, 0)]
    assert np.isfinite(flatten_parameters(trainer.target)).all()


def test_rows_with_non_finite_td_errors_get_priority_0():
    tape = Tape(spoiled(0, [3, 7]))
    make_trainer(tape).step(0.0)
    (update,) = tape.updates
    assert np.flatnonzero(update.priorities == 0).tolist() == [3, 7]
    assert np.isfinite(update.priorities).all()
    np.testing.assert_array_equal(update.keys, make_batch(0).keys)


def test_rows_whose_loss_overflows_get_priority_0():
    tape = Tape(make_batch(0))
    tape.batches[0].n_step_return[[3, 7]] = [2e19, -1e30]
    trainer = make_trainer(tape, loss="squared")
    trainer.step(0.0)
    assert trainer.num_skipped == 1
    (update,) = tape.updates
    assert np.flatnonzero(update.priorities == 0).tolist() == [3, 7]


def test_unusable_row_has_no_effect_and_gets_priority_0(caplog):
    batch, twin = make_batch(0), make_batch(0)
    for one, number in ((batch, 5.0), (twin, 9.0)):
        one.probability[2] = np.inf
        one.stacks[:, 2] = number
        one.n_step_return[2] = number
    networks = []
    for one in (batch, twin):
        tape = Tape(one)
        trainer = make_trainer(tape)
        trainer.step(0.0)
        assert np.flatnonzero(tape.updates[0].priorities == 0).tolist() == [2]
        assert (trainer.num_unusable, trainer.num_skipped) == (1, 0)
        assert describe_training(trainer).unusable_transitions == 1
        networks.append(flatten_parameters(trainer.online))
    assert (networks[0] == networks[1]).all()
    assert caplog.messages[0].startswith("1 ")


def test_credit_is_returned_if_all_td_errors_are_not_finite():
    tape = Tape(spoiled(5, slice(None)))
    make_trainer(tape).step(0.0)
    (update,) = tape.updates
    assert (update.number, update.keys.tolist(), update.priorities.tolist()) == (5, [], [])


def test_first_skipped_batches_are_saved(tmp_path):
    bad = SkippedBatches(tmp_path)
    for number in range(MAX_FILES + 2):
        bad.keep(spoiled(number, [3]), np.full(B, np.nan, np.float32), number + 1)
    files = sorted((tmp_path / "bad-batches").iterdir())
    assert len(files) == MAX_FILES
    arrays = safetensors.numpy.load_file(files[2])
    np.testing.assert_array_equal(arrays["keys"], make_batch(2).keys)
    np.testing.assert_array_equal(arrays["stacks"], make_batch(2).stacks)
    assert np.isnan(arrays["n_step_return"][3])


def test_full_disk_is_logged_and_saves_no_batch(tmp_path, caplog):
    (tmp_path / "bad-batches").write_text("a file where the folder should be")
    SkippedBatches(tmp_path).keep(spoiled(0, [3]), np.full(B, np.nan, np.float32), 1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "bad-batches" in caplog.text


def test_denormal_numbers_become_0_only_in_an_update():
    trainer, seen = make_trainer(Tape(make_batch(0), make_batch(1))), []
    update = trainer._update

    def observed(batch):
        seen.append(float(torch.tensor(1e-30) * 1e-9))
        if len(seen) == 2:
            raise RuntimeError("no update")
        return update(batch)

    trainer._update = observed
    trainer.step(0.0)
    with pytest.raises(RuntimeError, match="no update"):
        trainer.step(0.0)
    assert seen == [0.0, 0.0]
    assert float(torch.tensor(1e-30) * 1e-9) > 0
