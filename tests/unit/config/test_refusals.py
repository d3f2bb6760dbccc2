"""An unusable value is refused wherever a configuration is made; the error names the setting and the value."""

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


def by_option(tmp_path, setting, value):
    parse_config(["--preset", "paper", f"--{setting}={value}"], prog="apex train")


def by_toml(tmp_path, setting, value):
    branch, _, name = setting.rpartition(".")
    path = tmp_path / "run.toml"
    path.write_text(f"{f'[{branch}]' if branch else ''}\n{name} = {value!r}\n")
    load_toml(path)


def by_preset(tmp_path, setting, value):
    branch, _, name = setting.rpartition(".")
    apex.train(apex.preset("paper", **({branch: {name: value}} if branch else {name: value})))


def by_replace(tmp_path, setting, value):
    config = Config()
    branch, _, name = setting.rpartition(".")
    replace(config, **({branch: replace(getattr(config, branch), **{name: value})} if branch else {name: value}))


SOURCES = [by_option, by_toml, by_preset, by_replace]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize(
    ("setting", "value", "limits"),
    [
        ("seed", -1, ["2147483647"]),
        ("seed", 2**31, ["2147483647"]),
        ("actor.n_step", "three", ["1 to 64"]),
        ("actor.n_step", 0, ["1 to 64"]),
        ("actor.n_step", 65, ["1 to 64"]),
        ("actor.gamma", 0.0, ["above 0", "at most 1"]),
        ("actor.gamma", 1.5, ["above 0", "at most 1"]),
        ("run.stop_score", "high", ["none"]),
        ("learner.device", "tpu", ["auto, cpu, cuda"]),
        ("environment.id", "", []),
        ("network.factory", "mine", ["package.module:name"]),
        ("replay.capacity", 10_000, ["replay.min_size_to_sample 50000"]),
        ("run.max_steps", 2**64, ["2^62"]),
        ("run.stuck_seconds", 1e308, ["1000000.0"]),
        ("transport.experience_port", 22003, ["transport.control_port"]),
        ("replay.min_size_to_sample", 100, ["learner.batch_size 512"]),
    ],
)
def test_an_unusable_value_is_refused_by_every_source(tmp_path, make, setting, value, limits):
    with pytest.raises(ConfigError) as error:
        make(tmp_path, setting, value)
    assert [text for text in (setting, str(value), *limits) if text not in error.value.problem] == []


@pytest.mark.parametrize("make", SOURCES)
def test_port_0_of_tensorboard_is_refused_with_the_option_without_it(tmp_path, make):
    with pytest.raises(ConfigError, match=r"run\.tensorboard_port.*1024.*\b0;") as error:
        make(tmp_path, "run.tensorboard_port", 0)
    assert "--run.no-tensorboard" in error.value.remedy


@pytest.mark.parametrize("make", SOURCES[:3])
def test_an_unknown_setting_is_refused_with_a_similar_name(tmp_path, make):
    with pytest.raises(ConfigError, match=r"actor\.n[-_]stpe") as error:
        make(tmp_path, "actor.n_stpe", 3)
    assert re.search(r"actor\.n[-_]step\?", error.value.remedy)
    with pytest.raises(TypeError, match="n_stpe"):
        by_replace(None, "actor.n_stpe", 3)


@pytest.mark.parametrize("make", [by_option, by_preset, by_replace])
@pytest.mark.parametrize(("setting", "value"), [("actor.n_step", "\udcff"), ("run.name", "a\0b")])
def test_bytes_that_are_not_text_are_refused(tmp_path, make, setting, value):
    with pytest.raises(ConfigError, match=re.escape(setting)):
        make(tmp_path, setting, value)


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(tmp_path, make, number):
    value = TomlFloat(number) if make is by_toml else float(number)
    with pytest.raises(ConfigError, match=rf"run\.max_minutes.*{number}"):
        make(tmp_path, "run.max_minutes", value)


class TomlFloat(str):
    """A number that TOML writes without quotes."""

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
def test_a_value_beyond_a_limit_is_refused_with_its_name(branch, name, value):
    config = getattr(Config(), branch) if branch != "seed" else Config()
    with pytest.raises(ConfigError) as error:
        replace(config, **{name: value})
    assert error.value.problem.startswith(f"{name if branch == 'seed' else f'{branch}.{name}'} must be ")
    assert error.value.problem.endswith(f", got {value!r}")


def test_every_number_but_the_port_offset_has_a_range():
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
def test_the_annotation_describes_the_allowed_values(annotation, sentence):
    assert describe(annotation) == sentence
