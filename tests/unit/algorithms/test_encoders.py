"""Encoders: the parts of a frame are found again, and each kind of part has its encoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import VECTORS
from torch.nn import functional

from apex.algorithms.encoders import Encoder, channels_first, convolutions, split
from apex.algorithms.exported import ENCODERS
from apex.schema import Part

PARTS = (
    Part("map", "bool", (3, 5, 2), 1),
    Part("camera", "uint8", (36, 40, 3)),
    Part("speed", "float32", (3,)),
    Part("goal.kind", "int32", (2,), 6),
    Part("cells", "uint8", (5, 5)),
    Part("ram", "uint8", (4,), 9),
)
SCHEMA = replace(
    VECTORS,
    frame_shape=(sum(part.num_bytes for part in PARTS),),
    frame_dtype="uint8",
    codec="lz4",
    stack=2,
    parts=PARTS,
)


def draw_values(rng, size=3):
    """Returns random values of each part, dtype[size, 2, *shape]."""
    shape = (size, SCHEMA.stack)
    return {
        "map": rng.integers(0, 2, (*shape, 3, 5, 2)).astype(bool),
        "camera": rng.integers(0, 256, (*shape, 36, 40, 3)).astype(np.uint8),
        "speed": rng.normal(size=(*shape, 3)).astype(np.float32),
        "goal.kind": rng.integers(0, 7, (*shape, 2)).astype(np.int32),
        "cells": rng.integers(0, 11, (*shape, 5, 5)).astype(np.uint8),
        "ram": rng.integers(0, 10, (*shape, 4)).astype(np.uint8),
    }


def pack(values):
    """Returns the bytes of frames, uint8[B, S, F], one value after the other."""
    flat = {name: array.reshape(*array.shape[:2], -1) for name, array in values.items()}
    rows = [
        np.packbits(v, -1, "little") if v.dtype == bool else np.ascontiguousarray(v).view(np.uint8)
        for v in flat.values()
    ]
    return torch.from_numpy(np.concatenate(rows, -1))


@pytest.mark.parametrize(("size", "stack"), [(3, 2), (1, 2), (1, 1), (3, 1)])
def test_parts_are_found_again_in_the_bytes_of_a_frame(size, stack):
    values = {name: array[:, :stack] for name, array in draw_values(np.random.default_rng(0), size).items()}
    frames = pack(values)
    assert frames.shape == (size, stack, SCHEMA.frame_shape[0])
    assert frames.shape[2] % 4  # so that the strides of a single frame are no multiples of 4
    found = split(frames, SCHEMA.parts)
    assert list(found) == list(values)
    for name, expected in values.items():
        assert np.array_equal(found[name].numpy(), expected), name


def test_encoder_of_bytes_equals_that_of_a_dictionary():
    encoder, values = Encoder(SCHEMA, width=0.25, units=8), draw_values(np.random.default_rng(1))
    from_bytes = encoder(pack(values))
    assert from_bytes.shape == (3, encoder.num_features)
    tensors = {name: torch.from_numpy(array) for name, array in values.items()}
    assert torch.equal(encoder(tensors), from_bytes)


def test_every_part_changes_the_features():
    encoder, values = Encoder(SCHEMA, width=0.25, units=8), draw_values(np.random.default_rng(2))
    before = encoder(pack(values))
    for name, array in draw_values(np.random.default_rng(3)).items():
        assert not torch.equal(encoder(pack({**values, name: array})), before), name


@pytest.mark.parametrize("parts", [PARTS, (), (Part("large", "uint8", (150, 140)),), (PARTS[0],)])
def test_exported_code_computes_the_same_features(parts):
    """The code of `apex export`, run as it is; `()`: a single grid, which is no dictionary."""
    shape = (sum(part.num_bytes for part in parts),) if parts else (5, 5)
    schema = replace(SCHEMA, frame_shape=shape, parts=parts)
    encoder = Encoder(schema, width=0.25, units=8)
    frames = torch.randint(256, (3, *schema.observation_shape), dtype=torch.uint8)
    if parts == PARTS:
        frames = pack(draw_values(np.random.default_rng(5)))
    w = {f"body.{name}": tensor for name, tensor in encoder.state_dict().items()}
    names = {"torch": torch, "F": functional, "w": w}
    names["linear"] = lambda name, x: functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])
    exec(ENCODERS, names)
    found = split(frames, parts)
    features = eval(encoder.code("body"), names | {"x": found if parts else found["observation"]})
    torch.testing.assert_close(features, encoder(frames))


def test_categories_are_one_hot_vectors_times_a_matrix():
    part = PARTS[3]
    schema = replace(SCHEMA, frame_shape=(part.num_bytes,), parts=(part,))
    encoder = Encoder(schema, width=1.0, units=5)
    indices = draw_values(np.random.default_rng(4))["goal.kind"]
    one_hot = functional.one_hot(torch.from_numpy(indices).long(), 7).sum(2).flatten(1).float()
    expected = torch.relu(one_hot @ encoder.encoders[0].table)
    torch.testing.assert_close(encoder(pack({"goal.kind": indices})), expected)


def test_cells_of_a_grid_enter_as_their_bits():
    schema = replace(SCHEMA, frame_shape=(5, 5), parts=(), stack=1)
    encoder = Encoder(schema, width=1.0, units=1)
    seen = []
    encoder.encoders[0].layers[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    cells = torch.randint(256, (2, 1, 5, 5), dtype=torch.uint8)
    encoder(cells)
    weights = 2 ** torch.arange(8).view(1, 8, 1, 1)
    assert torch.equal((seen[0] * weights).sum(1, keepdim=True).to(torch.uint8), cells)
    assert set(seen[0].unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("side", [1, 2, 3, 6, 7, 8, 15, 16, 35])
@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_grids_of_every_size_are_encoded(side, dtype):
    part = Part("grid", dtype, (side, side + 1, 4))
    schema = replace(SCHEMA, frame_shape=(part.num_bytes,), parts=(part,))
    assert 1 <= Encoder(schema, width=1.0, units=1).num_features <= 32 * 15 * 16


@pytest.mark.parametrize(("height", "width", "side"), [(36, 36, 1), (84, 84, 7), (135, 135, 12), (480, 640, 12)])
def test_features_of_large_images_are_pooled(height, width, side):
    layers, num_features = convolutions(3, height, width, 0.125)
    output = torch.nn.Sequential(*layers)(torch.zeros(1, 3, height, width))
    assert output.shape == (1, num_features)
    assert num_features == 8 * side * side


def test_channels_of_the_frames_of_a_stack_follow_each_other():
    images = torch.arange(2 * 3 * 4 * 5 * 2).view(2, 3, 4, 5, 2)
    stacked = channels_first(images)
    assert stacked.shape == (2, 6, 4, 5)
    for frame in range(3):
        for channel in range(2):
            assert torch.equal(stacked[:, 2 * frame + channel], images[:, frame, ..., channel])
