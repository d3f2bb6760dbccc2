"""Checks values against the types and ranges in their annotations whenever a configuration is created."""

import functools
import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import FunctionType, NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from apex.errors import ConfigError
from apexreplay.errors import require

LARGEST = 2**62  # largest integer allowed for a setting, so that sums still fit into the 64 bits of control messages
PositiveInt = Annotated[int, Meta(ge=1, le=LARGEST)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]  # at most 12 days
Probability = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, Meta(ge=1024, le=65535)]

_NOUNS = {"IntType": "an integer", "FloatType": "a number", "BoolType": "true or false", "NoneType": "none"}
_LIMITS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, slots=True)
class Branch:
    """Base class of the configuration dataclasses. The constructor checks each field, also in `dataclasses.replace`."""

    def __post_init__(self) -> None:
        for name, annotation in self.field_types().items():
            object.__setattr__(self, name, checked(setting_name(self, name), annotation, getattr(self, name)))
        self.check_relations()

    def check_relations(self) -> None:
        """Raises ConfigError for values that contradict each other."""

    @classmethod
    @functools.cache
    def field_types(cls) -> dict[str, Any]:
        """Returns {field name: annotation}, where the annotation includes the range."""
        return get_type_hints(cls, include_extras=True)


def require_setting(condition: bool, problem: str, remedy: str = "") -> None:
    """Raises ConfigError with `problem` and `remedy` unless `condition` holds."""
    require(condition, problem, ConfigError, remedy=remedy)


def setting_name(branch: object, field: str) -> str:
    """Returns the dotted name of a field: `actor.n_step` for an ActorConfig, `seed` for a Config."""
    return f"{type(branch).__name__.removesuffix('Config').lower()}.{field}".lstrip(".")


def checked(name: str, annotation: Any, value: Any) -> Any:
    """Returns `value`, converted from int to float if needed; raises ConfigError with the remedy in the annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Branch):
        if not isinstance(value, annotation):
            raise ConfigError(f"{name} must be of the type {annotation.__name__}, got {value!r}")
        return value
    if isinstance(value, type | FunctionType) and plain_type(annotation) is str:
        value = by_name(name, value)
    try:
        result = msgspec.convert(value, annotation, strict=True)
    except (msgspec.ValidationError, UnicodeError):  # UnicodeError: text that is not valid UTF-8
        allowed = "an integer of at most 2^62" if type(value) is int and value > LARGEST else describe(annotation)
        remedy = next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, str)), "")
        raise ConfigError(f"{name} must be {allowed}, got {value!r}", remedy) from None
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if isinstance(result, str) and "\0" in result:
        raise ConfigError(f"{name} must be text without null bytes, got {value!r}")
    return result


def by_name(setting: str, value: Any) -> str:
    """Returns module:name of a class or function; raises ConfigError unless it is at the top level of its module."""
    text, remedy = f"{value.__module__}:{value.__qualname__}", "define it at the top level of a module"
    problem = f"{setting} {text!r}: other processes cannot import what a function or a class defines"
    require_setting(value.__qualname__.isidentifier(), problem, remedy)
    return text


def check_arguments(name: str, args: dict[str, Any]) -> None:
    """Raises ConfigError if `args` contains render_mode, or a value that JSON or TOML cannot hold."""
    if "render_mode" in args:
        raise ConfigError(f"{name} must not have render_mode, because --video sets it")
    check_plain(name, args)


def check_plain(name: str, value: Any) -> None:
    """Raises ConfigError unless JSON and TOML can both hold the value: null, NaN and infinity are not allowed."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check_plain(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for entry in value:
            check_plain(name, entry)
    elif not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} must be text, a finite number, true or false, a list or a table, got {value!r}")


def from_text(annotation: Any, text: str) -> Any:
    """Returns `text` converted to a number, None or JSON table if `annotation` allows that, else the unchanged text."""
    plain = plain_type(annotation)
    if get_origin(plain) is dict:
        with suppress(ValueError):
            return json.loads(text)
    allowed = [plain_type(each) for each in get_args(plain) or (plain,)]
    if NoneType in allowed and text.lower() == "none":
        return None
    for number in (int, float):
        if number in allowed:
            with suppress(ValueError):
                return number(text)
    return text


def plain_type(annotation: Any) -> Any:
    """Returns the annotation without its range."""
    return annotation.__origin__ if get_origin(annotation) is Annotated else annotation


def describe(annotation: Any) -> str:
    """Returns the allowed values, such as "an integer from 1 to 64"."""
    info: Any = msgspec.inspect.type_info(annotation)
    return " or ".join(_describe(each) for each in getattr(info, "types", (info,)))


def _describe(info: Any) -> str:
    kind = type(info).__name__
    if kind == "DictType":
        return "a table of names and values"
    if kind == "LiteralType":
        return f"one of {', '.join(info.values)}"
    if kind == "StrType":
        return "text that is not empty" if info.min_length else "text"
    limits = {name: bound for name in _LIMITS if (bound := getattr(info, name, None)) not in (None, LARGEST)}
    if list(limits) == ["ge", "le"]:
        return f"{_NOUNS[kind]} from {info.ge} to {info.le}"
    return " ".join([_NOUNS[kind], " and ".join(f"{_LIMITS[name]} {bound}" for name, bound in limits.items())]).strip()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean ...?" with similar known names, or "".

    Known names with the same last part as `name` come first, then those whose initials it is: lr for learning_rate.
    """
    leaf, names = last_part(name), list(known)
    similar = [each for each in get_close_matches(name, names, n=1) if get_close_matches(leaf, [last_part(each)])]
    initials = [each for each in names if re.sub(r"([a-z])[a-z0-9]*[_-]?", r"\1", last_part(each)) == leaf]
    near = [each for each in names if last_part(each) == leaf] or similar or initials * (len(leaf) > 1)
    return f"did you mean {' or '.join(near)}?" if near else ""


def last_part(name: str) -> str:
    """Returns the last part of a dotted name: `n_step` for actor.n_step and --actor.n_step."""
    return name.rpartition(".")[2].lstrip("-")
