"""A value that may not be configured is refused wherever a configuration is made, and the refusal names it."""

import re
from dataclasses import is_dataclass, replace
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

import apex
from apex.command_line import parse_config
from apex.config import Config, flatten, load_toml
from apex.config.validation import describe
from apex.errors import ConfigError


def on_the_command_line(tmp_path, setting, value):
    parse_config(["--preset", "paper", f"--{setting}={value}"], prog="apex train")


def in_a_toml_file(tmp_path, setting, value):
    branch, _, name = setting.rpartition(".")
    path = tmp_path / "run.toml"
    path.write_text(f"{f'[{branch}]' if branch else ''}\n{name} = {value!r}\n")
    load_toml(path)


def in_a_call_of_train(tmp_path, setting, value):
    branch, _, name = setting.rpartition(".")
    apex.train(apex.preset("paper", **({branch: {name: value}} if branch else {name: value})))


def by_dataclasses_replace(tmp_path, setting, value):
    config = Config()
    branch, _, name = setting.rpartition(".")
    replace(config, **({branch: replace(getattr(config, branch), **{name: value})} if branch else {name: value}))


DOORS = [on_the_command_line, in_a_toml_file, in_a_call_of_train, by_dataclasses_replace]


@pytest.mark.parametrize("make", DOORS)
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", -1, "seed must be an integer from 0 to 2147483647, got -1"),
        ("seed", 2**31, "seed must be an integer from 0 to 2147483647, got 2147483648"),
        ("actor.n_step", "three", "actor.n_step must be an integer from 1 to 64, got 'three'"),
        ("actor.n_step", 0, "actor.n_step must be an integer from 1 to 64, got 0"),
        ("actor.n_step", 65, "actor.n_step must be an integer from 1 to 64, got 65"),
        ("actor.gamma", 0.0, "actor.gamma must be a number above 0 and at most 1, got 0.0"),
        ("actor.gamma", 1.5, "actor.gamma must be a number above 0 and at most 1, got 1.5"),
        ("run.stop_score", "high", "run.stop_score must be a number or none, got 'high'"),
        ("learner.device", "tpu", "learner.device must be one of auto, cpu, cuda, got 'tpu'"),
        ("environment.id", "", "environment.id must be text that is not empty, got ''"),
        ("network.factory", "mine", "network.factory must have the form package.module:name, got 'mine'"),
        ("replay.capacity", 10_000, "replay.min_size_to_sample 50000 must be <= replay.capacity 10000"),
        ("run.max_steps", 2**64, "run.max_steps must be an integer of at most 2^62, got 18446744073709551616"),
        ("run.stuck_seconds", 1e308, "run.stuck_seconds must be a number from 0 to 1000000.0, got 1e+308"),
        (
            "transport.experience_port",
            22003,
            "transport.control_port and transport.experience_port are both 22003: change one",
        ),
        ("replay.min_size_to_sample", 100, "learner.batch_size 512 must be <= replay.min_size_to_sample 100"),
    ],
)
def test_a_value_out_of_range_of_another_type_or_in_contradiction_is_refused(tmp_path, make, setting, value, message):
    with pytest.raises(ConfigError) as refusal:
        make(tmp_path, setting, value)
    assert str(refusal.value) == message


@pytest.mark.parametrize("make", DOORS[:3])
def test_a_setting_that_does_not_exist_is_refused_with_one_that_does(tmp_path, make):
    with pytest.raises(ConfigError, match=r"actor\.n[-_]stpe.*; did you mean (--)?actor\.n[-_]step\?"):
        make(tmp_path, "actor.n_stpe", 3)


@pytest.mark.parametrize("make", [on_the_command_line, in_a_call_of_train, by_dataclasses_replace])
def test_bytes_that_are_no_text_are_refused_where_a_number_belongs(tmp_path, make):
    with pytest.raises(ConfigError, match=r"actor\.n_step must be an integer from 1 to 64, got"):
        make(tmp_path, "actor.n_step", "\udcff")


def test_text_with_a_null_byte_is_refused():
    with pytest.raises(ConfigError, match=r"run\.name must be text without null bytes"):
        apex.preset("paper", run={"name": "a\0b"})


def test_replace_refuses_a_setting_that_does_not_exist():
    with pytest.raises(TypeError, match="n_stpe"):
        by_dataclasses_replace(None, "actor.n_stpe", 3)


@pytest.mark.parametrize("make", DOORS)
@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(tmp_path, make, word):
    value = TomlFloat(word) if make is in_a_toml_file else float(word)
    with pytest.raises(ConfigError, match=f"run.max_minutes must be a .*number.*, got {word}"):
        make(tmp_path, "run.max_minutes", value)


class TomlFloat(str):
    """TOML writes these numbers as words without quotes."""

    __repr__ = str.__str__


def bounds():
    """Each limit of each setting, and the nearest value beyond it."""
    for branch, kind in Config.field_types().items():
        fields = kind.field_types().items() if isinstance(kind, type) and is_dataclass(kind) else [("seed", kind)]
        for name, hint in fields:
            info = msgspec.inspect.type_info(hint)
            step = 1 if isinstance(info, msgspec.inspect.IntType) else 1e-9
            for limit, beyond in (("ge", -step), ("gt", 0), ("le", step), ("lt", 0)):
                if getattr(info, limit, None) is not None:
                    yield branch, name, getattr(info, limit) + beyond


@pytest.mark.parametrize(("branch", "name", "value"), list(bounds()))
def test_what_lies_beyond_a_limit_is_refused_in_a_sentence_that_names_setting_and_value(branch, name, value):
    config = getattr(Config(), branch) if branch != "seed" else Config()
    with pytest.raises(ConfigError) as refusal:
        replace(config, **{name: value})
    dotted = name if branch == "seed" else f"{branch}.{name}"
    assert re.fullmatch(
        rf"{re.escape(dotted)} must be (an integer|a number) .*, got {re.escape(repr(value))}", str(refusal.value)
    )


def test_every_count_and_every_number_but_a_score_and_an_offset_has_a_range():
    ranged = {f"{branch}.{name}".replace("seed.seed", "seed") for branch, name, _ in bounds()}
    numbers = {name for name, value in flatten(Config()).items() if type(value) in (int, float)}
    assert numbers - ranged == {"transport.port_offset"}


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        (int, "an integer"),
        (Annotated[int, Meta(ge=2)], "an integer of at least 2"),
        (Annotated[float, Meta(ge=0, lt=1)], "a number of at least 0 and below 1"),
        (Annotated[float, Meta(gt=0)], "a number above 0"),
        (bool, "true or false"),
        (str, "text"),
    ],
)
def test_what_a_value_may_be_is_said_by_its_annotation(annotation, sentence):
    assert describe(annotation) == sentence
