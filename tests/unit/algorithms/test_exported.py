"""Tests the beginning of the exported code; the tests of `apex export` run the whole code."""

from collections import OrderedDict

import torch
from safetensors.torch import save_file
from support.builders import PIXELS, VECTORS

from apex.algorithms.exported import begin_code, describe_input


def run(code, monkeypatch, folder):
    """Executes the code in a folder whose file has one layer `a` of ones; returns the names that the code defines."""
    save_file({"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}, folder / "model.safetensors")
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    return names


def test_code_of_a_built_in_network_loads_tensors_and_layers(monkeypatch, tmp_path):
    names = run(begin_code("", VECTORS), monkeypatch, tmp_path)
    assert names["linear"]("a", torch.ones(1, 3)).tolist() == [[4, 4]]


def test_code_of_a_custom_network_imports_its_factory(monkeypatch, tmp_path):
    names = run(begin_code("collections:OrderedDict", PIXELS), monkeypatch, tmp_path)
    assert names["make"] is OrderedDict
    assert (names["schema"].frame_shape, names["schema"].num_actions) == (PIXELS.frame_shape, PIXELS.num_actions)
    assert names["w"].keys() == {"a.weight", "a.bias"}


def test_input_has_stacks_for_images_and_custom_networks():
    assert describe_input("", VECTORS) == "float32 [batch, 4]"
    assert describe_input("my:Net", VECTORS) == "float32 [batch, 1, 4]"
    assert describe_input("", PIXELS) == "uint8 [batch, 4, 6, 5]"
