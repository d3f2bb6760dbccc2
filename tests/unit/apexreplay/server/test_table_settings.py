"""The settings of a table, in Python, JSON and TOML: wrong values are refused by name."""

import json
from dataclasses import replace

import pytest
from support.tables import TABLES

from apexreplay.errors import DataError, UsageError
from apexreplay.item_kinds import Single, Window
from apexreplay.server.table_settings import TableSettings, read_tables
from apexreplay.serving import from_dict, to_dict
from apexreplay.tables import table
from apexreplay.transport.endpoints import max_segment_bytes

DECLARED = {"steps": {"x": "int64"}}
TOML = """
[steps]
capacity = 1_000
samples_per_insert = 8
inserts_wait = true
steps.image = { dtype = "uint8", shape = [8, 8] }
steps.action = "int64"

[windows]
item = { kind = "window", stack = 4, span = 3 }
kept = ["id"]

[windows.steps]
image = ["uint8", [20, 16], "raw"]

[windows.values]
n_step = "float32"
id = "int64"
"""


def test_a_file_declares_tables_with_their_limits(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(TOML)
    steps, windows = read_tables(path)
    assert steps.table == table("steps", {"image": ("uint8", (8, 8)), "action": "int64"}, item=Single())
    assert (steps.capacity, steps.samples_per_insert, steps.inserts_wait) == (1_000, 8, True)
    values = {"n_step": "float32", "id": "int64"}
    image = {"image": ("uint8", (20, 16), "raw")}
    assert windows.table == table("windows", image, item=Window(4, 3), values=values, kept=("id",))
    assert windows == TableSettings(table=windows.table)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"capacity": 0}, "t.capacity"),
        ({"capacity": "many"}, "t.capacity"),
        ({"capacity": True}, "t.capacity"),
        ({"capacity": 2.5}, "t.capacity"),
        ({"max_bytes": -1}, "t.max_bytes"),
        ({"max_bytes": 1_000}, "t.max_bytes"),  # less than one segment
        ({"priority_exponent": -0.1}, "t.priority_exponent"),
        ({"priority_exponent": float("nan")}, "t.priority_exponent"),
        ({"min_priority": 0}, "t.min_priority"),
        ({"min_size": 0}, "t.min_size"),
        ({"min_size": 101, "capacity": 100}, "t.min_size"),
        ({"samples_per_insert": -1}, "t.samples_per_insert"),
        ({"samples_per_insert": float("inf")}, "t.samples_per_insert"),
        ({"tolerance": [1]}, "t.tolerance"),
        ({"inserts_wait": "no"}, "t.inserts_wait"),
        ({"num_streams": 0}, "t.num_streams"),
        ({"num_samplers": 7}, "t.num_samplers"),
        ({"segment_length": 51, "capacity": 50}, "t.segment_length"),
        ({"segment_length": 4_001}, "t.segment_length"),
        ({"window": 64}, "t.window"),
        ({"order": "random"}, "random"),
        ({"order": "newest", "num_samplers": 2}, "t.order"),
        ({"order": "queue", "samples_per_insert": 1}, "t.order"),
        ({"order": "queue", "inserts_wait": True, "capacity": 100}, "t.capacity"),
        ({"order": "queue", "inserts_wait": True, "max_bytes": 14_000}, "t.max_bytes"),
        ({"order": "queue", "inserts_wait": True, "capacity": 120, "min_size": 21}, "t.min_size"),
        ({"order": "queue", "draws_per_item": 0}, "t.draws_per_item"),
        ({"draws_per_item": 2}, "t.draws_per_item"),
        ({"max_version_lag": -2}, "t.max_version_lag"),
        ({"order": "queue", "inserts_wait": True, "max_version_lag": 0}, "t.max_version_lag"),
        ({"item": {"kind": "sequence"}}, "t.item"),
        ({"item": {"kind": "sequence", "length": 4, "stack": 2}}, "t.item"),
        ({"item": {"kind": "sequence", "length": 4, "period": 5}}, "5"),
        ({"colour": 1}, "colour"),
        ({"steps": {}}, "t"),
        ({"steps": 3}, "steps"),
        ({"steps": {"x": {"dtype": "int64", "shape": 3}}}, "shape"),
        ({"steps": {"x": {"dtype": "text"}}}, "text"),
        ({"steps": {"x": {"dtype": 7}}}, "7"),
        ({"steps": {"X": "int64"}}, "X"),
        ({"values": ["y"]}, "values"),
        ({"kept": ["y"]}, "y"),
        ({"kept": 4}, "kept"),
        ({"item": 4}, "item"),
        ({"item": {"stack": 1, "span": 1}}, "t.item.kind"),
        ({"item": {"kind": "queue"}}, "t.item.kind"),
        ({"item": {"kind": ["window"]}}, "t.item.kind"),
        ({"item": {"kind": "step", "stack": 1}}, "t.item"),
        ({"item": {"kind": "window", "stack": 1}}, "t.item"),
        ({"item": {"kind": "window", "stack": "1", "span": 1}}, "stack"),
        ({"item": {"kind": "window", "stack": 2.5, "span": 1}}, "stack"),
    ],
    ids=str,
)
def test_every_wrong_setting_is_refused_by_name(changed, named):
    with pytest.raises(UsageError) as refused:
        TableSettings.from_dict("t", {**DECLARED, **changed})
    assert named in refused.value.problem


@pytest.mark.parametrize(
    "content",
    ["", "capacity = 3", "[t]\nsteps = 1", "[t", "[t]\nsteps.x = 'int64'\nitem = 'step'", "[T]\nsteps.x = 'i8'"],
)
def test_a_file_without_a_usable_table_is_refused(tmp_path, content):
    path = tmp_path / "tables.toml"
    path.write_text(content)
    with pytest.raises(UsageError):
        read_tables(path)
    for declared, named, remedy in (
        ('steps.x = "int65"', f"{path}: t.x: 'int65' is not a dtype", ""),
        ('steps.x = "int64"\nmin_siz = 3', f"{path}: t has unknown settings ['min_siz']", "did you mean min_size?"),
        ('steps.x = "int64"\nzzz = 3', f"{path}: t has unknown settings ['zzz']", "known are steps, item, "),
    ):
        path.write_text(f"[t]\n{declared}\n")
        with pytest.raises(UsageError) as refused:
            read_tables(path)
        assert refused.value.problem.startswith(named)
        assert refused.value.remedy.startswith(remedy)
    path.write_bytes(b"\xff")
    for unreadable in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(DataError) as refused:
            read_tables(unreadable)
        assert str(unreadable) in refused.value.problem


@pytest.mark.parametrize("name", TABLES)
def test_settings_are_the_same_after_json(name):
    settings = TableSettings(table=TABLES[name], capacity=7, segment_length=5, min_size=2, tolerance=3)
    assert from_dict(json.loads(json.dumps(to_dict(settings)))) == settings


@pytest.mark.parametrize("name", TABLES)
def test_the_memory_holds_one_segment_whose_fields_do_not_compress(name):
    small = TableSettings(table=TABLES[name], capacity=20, segment_length=20)
    need = max_segment_bytes(small.table, 20)
    assert small.store.sizes.arena_bytes >= need - 8
    assert replace(small, max_bytes=need).max_bytes == need


def test_a_table_whose_segments_could_have_4_gib_is_refused():
    volume = table("t", {"volume": ("float32", (512, 256, 256))})  # 2**27 bytes
    assert TableSettings(table=volume, segment_length=30).segment_length == 30
    for changed in ({"segment_length": 31}, {}, {"max_bytes": 2**40}):
        with pytest.raises(UsageError, match=r"t\.segment_length .* 4 GiB") as refused:
            TableSettings(table=volume, **changed)
        assert refused.value.remedy.startswith("lower")


@pytest.mark.parametrize(("order", "draws_per_item", "most"), [("newest", 1, 91), ("queue", 2, 182)])
def test_a_batch_has_items_that_are_always_there(order, draws_per_item, most):
    """Of 100 items, up to 9 are missing after the removal of a whole segment."""
    limits = {"capacity": 100, "segment_length": 10, "order": order, "draws_per_item": draws_per_item}
    assert TableSettings(table=table("t", {"x": "int64"}), **limits).max_batch == most
