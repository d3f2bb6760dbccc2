"""The recurrent Q-network: its values step by step, its observations, and custom bodies."""

import numpy as np
import pytest
import torch
from support.r2d2 import A, D, Twin, make_config, make_schema

from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.r2d2.algorithm import R2d2Algorithm
from apex.schema import Part
from apexreplay.errors import UsageError

OWN = """
import torch
from torch import nn

class Takes(nn.Module):
    def __init__(self, num_features=5):
        super().__init__()
        self.linear = nn.Linear(4, num_features)

    def forward(self, observation):
        part = observation["speed"] if isinstance(observation, dict) else observation
        return torch.tanh(self.linear(part.flatten(1)))

def make_body(schema):
    return Takes()

def make_matrix(schema):
    return nn.Linear(4, 3)

def make_text(schema):
    return "a network"
"""
PARTS = (Part("speed", "float32", (4,)), Part("camera", "uint8", (36, 36, 3)), Part("seen", "bool", (5, 5)))
BYTES = sum(part.num_bytes for part in PARTS)
FORMS = {
    "vector": {},
    "gray": {"shape": (40, 44), "dtype": "uint8", "codec": "lz4"},
    "colour": {"shape": (150, 140, 3), "dtype": "uint8", "codec": "lz4"},
    "grid": {"shape": (7, 7, 3), "dtype": "uint8", "codec": "lz4"},
    "parts": {"shape": (BYTES,), "dtype": "uint8", "codec": "lz4", "parts": PARTS},
}


@pytest.fixture
def own_body(tmp_path, monkeypatch):
    (tmp_path / "own_body.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def make(form="vector", **network):
    config = make_config(network={"width": 0.125, **network})
    return R2d2Algorithm(config, make_schema(config, **FORMS[form])).make_network()


def observe(schema_form, size, steps, seed=0):
    form, rng = {"shape": (4,), "dtype": "float32", **FORMS[schema_form]}, np.random.default_rng(seed)
    shape = size, steps, *form["shape"]
    if "parts" in form:
        parts = {
            "speed": rng.normal(size=(size, steps, 4)).astype(np.float32),
            "camera": rng.integers(256, size=(size, steps, 36, 36, 3), dtype=np.uint8),
            "seen": rng.integers(2, size=(size, steps, 5, 5), dtype=np.uint8),
        }
        packed = np.packbits(parts["seen"].reshape(size, steps, 25), axis=-1, bitorder="little")
        flat = [parts["speed"].view(np.uint8), parts["camera"].reshape(size, steps, -1), packed]
        return torch.from_numpy(np.concatenate(flat, 2)), {name: torch.from_numpy(part) for name, part in parts.items()}
    if form["dtype"] == "uint8":
        return torch.from_numpy(rng.integers(256, size=shape, dtype=np.uint8)), None
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32)), None


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_equals_its_steps_one_after_the_other(form):
    network = make(form)
    frames, parts = observe(form, 3, 4)
    start = torch.randn(3, D, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, after = network(frames, start)
        state, apart = start, []
        for t in range(4):
            q, state = network(frames[:, t : t + 1], state)
            apart.append(q)
    assert together.shape == (3, 4, A)
    assert torch.allclose(together, torch.cat(apart, 1), atol=1e-5)
    assert torch.allclose(after, state, atol=1e-5)
    if parts is not None:
        with torch.no_grad():
            assert torch.equal(network(parts, start)[0], together)


@pytest.mark.parametrize("dueling", [True, False])
def test_values_equal_the_definition(dueling):
    network = make(dueling=dueling)
    frames, _ = observe("vector", 2, 3)
    with torch.no_grad():
        q, _ = network(frames)
        alone, _ = network(frames, torch.zeros(2, D))
    assert torch.equal(q, alone)
    if dueling:
        twin = Twin(network, make_config())
        expected = torch.stack([torch.stack(twin.unroll(row.double(), torch.zeros(D).double(), 0)) for row in frames])
        assert torch.allclose(q.double(), expected, atol=1e-6)
    else:
        assert not [name for name in network.state_dict() if "value" in name]


def test_equal_seeds_give_equal_parameters_and_the_global_generator_stays():
    before = torch.get_rng_state()
    first, second = flatten_parameters(make()), flatten_parameters(make())
    assert (first == second).all()
    assert torch.equal(before, torch.get_rng_state())


def test_the_body_in_bfloat16_gives_nearly_the_same_float32_values():
    network = make("gray")
    frames, _ = observe("gray", 2, 3)
    with torch.no_grad():
        exact, _ = network(frames)
        rounded, state = network(frames, bfloat16=True)
    assert rounded.dtype == state.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=0.02)


@pytest.mark.usefixtures("own_body")
@pytest.mark.parametrize("form", ["vector", "parts"])
def test_a_custom_network_is_the_body(form):
    network = make(form, factory="own_body:make_body")
    assert network.recurrent.input_size == 5
    frames, _ = observe(form, 2, 3)
    q, _ = network(frames)
    assert q.shape == (2, 3, A)
    q.sum().backward()
    assert all(parameter.grad is not None for name, parameter in network.named_parameters() if "body" in name)


@pytest.mark.usefixtures("own_body")
@pytest.mark.parametrize(
    ("name", "problem"),
    [("make_matrix", r"returned float32\[2, 1, 3\]; return float32\[2, any\]"), ("make_text", "returned str")],
)
def test_a_custom_body_that_does_not_fit_is_refused(name, problem):
    with pytest.raises(UsageError, match=problem):
        make("vector", factory=f"own_body:{name}")


def test_stacks_of_frames_are_refused_with_the_setting_to_change():
    config = make_config()
    with pytest.raises(UsageError, match=r"have 4;.*--environment.frame-stack 1"):
        make_schema(config, **FORMS["gray"] | {"stack": 4})
    assert make_algorithm(config, make_schema(config)).name == "r2d2"
