"""Tests the double-Q loss and its gradient by hand and by definition, importance weights, and other targets."""

import numpy as np
import pytest
import torch

from apex.algorithms.losses import importance_weights, mean_loss
from apex.algorithms.n_step import RESCALING_EPSILON
from apex.dqn.losses import TargetRule, loss_and_gradients, munchausen, td_errors


def double_q_errors(q, next_q, next_q_target, action, n_step_return, discount, next_mask=None):
    return td_errors(TargetRule(), torch.cat([q, next_q]), next_q_target, action, n_step_return, discount, next_mask)


def double_q_loss(*, importance_weights, kind, **arguments):
    """Returns the loss, and |delta| without a gradient."""
    delta = double_q_errors(**arguments)
    return mean_loss(delta, importance_weights, kind), delta.detach().abs()


def batch(size=1, seed=0):
    """Returns random arguments of `double_q_loss`."""
    rng = np.random.default_rng(seed)
    q, next_q, next_q_target = (torch.from_numpy(rng.normal(size=(size, 3)).astype(np.float32)) for _ in range(3))
    return {
        "q": q,
        "next_q": next_q,
        "next_q_target": next_q_target,
        "action": torch.from_numpy(rng.integers(0, 3, size)),
        "n_step_return": torch.from_numpy(rng.normal(size=size).astype(np.float32)),
        "discount": torch.from_numpy(rng.choice([0.0, 0.97, 0.9], size).astype(np.float32)),
        "importance_weights": torch.from_numpy(rng.uniform(0.1, 1, size).astype(np.float32)),
    }


def row(**changes):
    """Returns one transition of different powers of ten, for which the online network prefers action 1."""
    arguments = {
        "q": [[1.0, 10.0, 100.0]],
        "next_q": [[0.0, 7.0, 3.0]],
        "next_q_target": [[5000.0, 1000.0, 9000.0]],
        "n_step_return": [0.5],
        "discount": [0.1],
        "importance_weights": [1.0],
    }
    tensors = {name: torch.tensor(value) for name, value in {**arguments, **changes}.items()}
    return {"action": torch.tensor([1]), **tensors}


def naive_loss(arguments, kind):
    """Computes one transition after the other; differentiable in q."""
    total, td_errors = 0.0, []
    for i, action in enumerate(arguments["action"].tolist()):
        next_action = max(range(arguments["q"].shape[1]), key=lambda a: arguments["next_q"][i, a].item())
        bootstrap = arguments["discount"][i].item() * arguments["next_q_target"][i, next_action].item()
        delta = arguments["n_step_return"][i].item() + bootstrap - arguments["q"][i, action]
        loss = delta**2 / 2 if kind == "squared" or abs(delta.item()) <= 1 else abs(delta) - 0.5
        total = total + arguments["importance_weights"][i].item() * loss
        td_errors.append(abs(delta.item()))
    return total / len(td_errors), td_errors


def test_target_network_values_the_online_networks_action():
    loss, td_errors = double_q_loss(**row(), kind="squared")
    assert td_errors.tolist() == pytest.approx([0.5 + 0.1 * 1000 - 10])
    assert loss.item() == pytest.approx(90.5**2 / 2)


def test_discount_0_leaves_only_the_return():
    _, td_errors = double_q_loss(**row(discount=[0.0]), kind="squared")
    assert td_errors.tolist() == pytest.approx([10 - 0.5])


@pytest.mark.parametrize(
    ("q", "expected"), [(0.5, 0.0), (0.9, 0.4**2 / 2), (0.1, 0.4**2 / 2), (1.5, 0.5), (3.5, 2.5), (-9.5, 9.5)]
)
def test_huber_loss_is_quadratic_up_to_1_and_linear_beyond(q, expected):
    loss, _ = double_q_loss(**row(q=[[0.0, q, 0.0]], discount=[0.0]), kind="huber")
    assert loss.item() == pytest.approx(expected)


def test_importance_weight_scales_the_loss_but_not_the_priority():
    loss, td_errors = double_q_loss(**row(importance_weights=[0.25]), kind="squared")
    assert loss.item() == pytest.approx(0.25 * 90.5**2 / 2)
    assert td_errors.tolist() == pytest.approx([90.5])


@pytest.mark.parametrize("kind", ["squared", "huber"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_their_definition(kind, seed):
    arguments = batch(17, seed=seed)
    q = arguments["q"].requires_grad_()
    loss, td_errors = double_q_loss(**arguments, kind=kind)
    (gradient,) = torch.autograd.grad(loss, q)
    expected, expected_td_errors = naive_loss(arguments, kind)
    (expected_gradient,) = torch.autograd.grad(expected, q)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert td_errors.tolist() == pytest.approx(expected_td_errors, rel=1e-4, abs=1e-6)
    assert td_errors.dtype is torch.float32


@pytest.mark.parametrize("kind", ["squared", "huber"])
@pytest.mark.parametrize("seed", range(5))
def test_manual_gradients_are_the_derivatives_of_the_loss(kind, seed):
    arguments = batch(17, seed=seed)
    q = arguments["q"].requires_grad_()
    expected, td_errors = double_q_loss(**arguments, kind=kind)
    (gradient,) = torch.autograd.grad(expected, q)
    weights = arguments.pop("importance_weights")
    with torch.no_grad():
        errors = double_q_errors(**arguments)
        loss, gradients = loss_and_gradients(errors, weights, kind=kind)
    assert torch.equal(loss, expected)
    assert torch.equal(errors.abs(), td_errors)
    torch.testing.assert_close(gradients, gradient.gather(1, arguments["action"].unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("kind", ["squared", "huber"])
def test_only_the_executed_actions_value_gets_a_gradient(kind):
    arguments = {name: v.requires_grad_() if name.endswith(("q", "target")) else v for name, v in row().items()}
    loss, td_errors = double_q_loss(**arguments, kind=kind)
    loss.backward()
    assert not td_errors.requires_grad
    assert not arguments["next_q"].grad.any()
    assert arguments["next_q_target"].grad is None
    assert arguments["q"].grad.tolist() == [[0.0, pytest.approx(-90.5 if kind == "squared" else -1.0), 0.0]]


@pytest.mark.parametrize("name", ["action", "n_step_return", "discount", "importance_weights"])
def test_column_that_would_broadcast_is_refused(name):
    arguments = batch(4)
    arguments[name] = arguments[name].unsqueeze(1)
    with pytest.raises(ValueError, match=rf"{name} has shape \[4, 1\], expected \[4\]"):
        double_q_loss(**arguments, kind="squared")


def test_importance_weights_equal_values_by_hand():
    # (1000 P)^-1/2: 1 / sqrt(4), 1 / sqrt(1), 1 / sqrt(100); divided by the largest, 1.
    weights = importance_weights(np.array([0.004, 0.001, 0.1]), 1000, 0.5)
    assert weights.dtype == np.float32
    assert weights == pytest.approx([0.5, 1.0, 0.1])


def test_least_probable_row_has_weight_1():
    weights = importance_weights(np.array([0.5, 0.1, 0.2]), 10, 0.4)
    assert weights.argmax() == 1
    assert weights.max() == 1


@pytest.mark.parametrize(("probability", "exponent"), [([0.25] * 4, 0.4), ([0.1, 0.2, 0.7], 0.0)])
def test_uniform_probability_or_exponent_0_gives_equal_weights(probability, exponent):
    assert importance_weights(np.array(probability), 4, exponent).tolist() == [1.0] * len(probability)


def test_importance_weights_accept_probabilities_of_any_size():
    weights = importance_weights(np.array([1e-300, 1.0]), 2**31, 1.0)
    assert weights.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_unusable_row_has_weight_0(exponent):
    weights = importance_weights(np.array([0.1, np.inf, 0.1]), 10, exponent)
    assert weights.tolist() == [1.0, 0.0, 1.0]
    assert importance_weights(np.array([np.inf, np.inf]), 10, exponent).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("probability", [0.0, -0.1, np.nan])
def test_probability_that_is_not_positive_is_refused(probability):
    with pytest.raises(ValueError, match="must be positive"):
        importance_weights(np.array([0.5, probability]), 10, 0.4)


def test_next_action_is_the_best_allowed_one():
    """The online network prefers action 1, and action 2 of the allowed ones, which the target network values 0.25."""
    rows = row(next_q=[[1.0, 9.0, 2.0]], next_q_target=[[8.0, 4.0, 0.25]], q=[[0.0, 0.0, 0.0]])
    rows.pop("importance_weights")
    free, bound = (double_q_errors(**rows, next_mask=mask) for mask in (None, torch.tensor([[True, False, True]])))
    assert (free - bound).item() == pytest.approx(rows["discount"].item() * (4.0 - 0.25))


def test_terminal_state_without_allowed_actions_has_value_0():
    rows = row(discount=[0.0])
    rows.pop("importance_weights")
    mask = torch.zeros(rows["next_q"].shape, dtype=torch.bool)
    assert torch.equal(double_q_errors(**rows, next_mask=mask), double_q_errors(**rows))


def naive_munchausen(q, next_q, action, *, temperature=0.03, share=0.9, lowest=-1.0):
    """Equation 2 of Vieillard et al. 2020 in float64, with sums over actions."""

    def policy(values):
        weights = np.exp((values - values.max()) / temperature)
        return weights / weights.sum()

    bonus, value = [], []
    for row, next_row, played in zip(q.double().numpy(), next_q.double().numpy(), action.tolist(), strict=True):
        with np.errstate(divide="ignore"):
            bonus.append(share * max(lowest, temperature * np.log(policy(row)[played])))
        pi = policy(next_row)
        value.append(sum(p * (x - temperature * np.log(p)) for p, x in zip(pi, next_row, strict=True) if p > 0))
    return bonus, value


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 100.0])
def test_munchausen_parts_match_their_definition(scale):
    rng = np.random.default_rng(3)
    q, next_q = (torch.from_numpy((scale * rng.normal(size=(50, 4))).astype(np.float32)) for _ in range(2))
    action = torch.from_numpy(rng.integers(0, 4, 50))
    got, (bonus, value) = munchausen(q, next_q, action), naive_munchausen(q, next_q, action)
    assert got[0].tolist() == pytest.approx(bonus, rel=1e-4, abs=1e-5)
    assert got[1].tolist() == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_munchausen_bonus_equals_values_by_hand():
    """Two equal actions: log pi = log(1/2). An action far below the best one gets the lowest bonus, -0.9."""
    bonus, next_value = munchausen(torch.tensor([[1.0, 1.0], [5.0, 0.0]]), torch.zeros(2, 2), torch.tensor([0, 1]))
    assert bonus.tolist() == pytest.approx([0.9 * 0.03 * np.log(0.5), -0.9])
    assert next_value.tolist() == pytest.approx([0.03 * np.log(2)] * 2)


def test_munchausen_target_uses_the_target_network_for_both_states():
    rule = TargetRule("munchausen")
    assert (rule.seen_online, rule.seen_by_target) == (slice(0, 1), slice(0, 2))
    q, target = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 1.0], [4.0, -4.0]])
    delta = td_errors(rule, q, target, torch.tensor([1]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert delta.item() == pytest.approx(0.5 + 0.9 * 0.03 * np.log(0.5) + 0.25 * 4.0 - 3.0, rel=1e-5)


def h(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + RESCALING_EPSILON * x


def test_rescaled_target_is_h_of_return_and_restored_value():
    q, next_q = torch.tensor([[0.0, 1.5]]), torch.tensor([[1.0, 0.0]])
    target = torch.tensor([[float(h(80.0)), 7.0]])
    delta = td_errors(
        TargetRule(rescaled=True),
        torch.cat([q, next_q]),
        target,
        torch.tensor([1]),
        *(torch.tensor([value]) for value in (10.0, 0.5)),
    )
    assert delta.item() == pytest.approx(h(10.0 + 0.5 * 80.0) - 1.5, rel=1e-5)


def test_rescaled_munchausen_target_restores_both_values():
    rule, q = TargetRule("munchausen", rescaled=True), torch.tensor([[0.0, 1.5]])
    target = torch.tensor([[float(h(8.0)), float(h(8.0))], [float(h(20.0)), float(h(-9.0))]])
    delta = td_errors(rule, q, target, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.5]))
    assert delta.item() == pytest.approx(h(1.0 + 0.027 * np.log(0.5) + 0.5 * 20.0), rel=1e-4)
