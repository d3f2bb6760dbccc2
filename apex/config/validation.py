"""Checks values against the types and ranges in their annotations, wherever a configuration is made."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from apex.errors import ConfigError

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, Meta(ge=1024, le=65535)]

_NOUNS = {"IntType": "an integer", "FloatType": "a number", "BoolType": "true or false", "NoneType": "none"}


@dataclass(frozen=True, slots=True)
class Branch:
    """Base of the configuration dataclasses. Its constructor checks each field, also for `dataclasses.replace`."""

    def __post_init__(self) -> None:
        for name, annotation in self.field_types().items():
            object.__setattr__(self, name, checked(setting_name(self, name), annotation, getattr(self, name)))
        self.check_relations()

    def check_relations(self) -> None:
        """Raises ConfigError for values that contradict each other."""

    @classmethod
    @functools.cache
    def field_types(cls) -> dict[str, Any]:
        """The annotation of each field, with its range."""
        return get_type_hints(cls, include_extras=True)


def setting_name(branch: object, field: str) -> str:
    """The dotted name of a branch's field: `actor.n_step` of an ActorConfig, `seed` of a Config."""
    return f"{type(branch).__name__.removesuffix('Config').lower()}.{field}".lstrip(".")


def checked(name: str, annotation: Any, value: Any) -> Any:
    """Returns `value`, an integer as a float where that is the type; raises ConfigError for another type or range."""
    if isinstance(annotation, type) and issubclass(annotation, Branch):
        if not isinstance(value, annotation):
            raise ConfigError(f"{name} must be an {annotation.__name__}, got {value!r}")
        return value
    try:
        result = msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} must be {describe(annotation)}, got {value!r}") from None
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    return result


def from_text(annotation: Any, text: str) -> Any:
    """The number or none that `text` stands for where `annotation` allows one, else `text`, for `checked` to refuse."""
    plain = annotation.__origin__ if get_origin(annotation) is Annotated else annotation
    allowed = get_args(plain) or (plain,)
    if NoneType in allowed and text.lower() == "none":
        return None
    for number in (int, float):
        if number in allowed:
            with suppress(ValueError):
                return number(text)
    return text


def describe(annotation: Any) -> str:
    """What a value may be, as in "an integer from 1 to 64"."""
    info: Any = msgspec.inspect.type_info(annotation)
    return " or ".join(_describe(each) for each in getattr(info, "types", (info,)))


def _describe(info: Any) -> str:
    kind = type(info).__name__
    if kind == "LiteralType":
        return f"one of {', '.join(info.values)}"
    if kind == "StrType":
        return "text that is not empty" if info.min_length else "text"
    bounds = {
        word: getattr(info, name, None)
        for name, word in (("ge", "of at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    }
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    if list(given) == ["of at least", "at most"]:
        return f"{_NOUNS[kind]} from {info.ge} to {info.le}"
    return " ".join([_NOUNS[kind], " and ".join(f"{word} {bound}" for word, bound in given.items())]).strip()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: known names with the last part of `name`, else one of similar spelling, else nothing."""
    leaf, names = name.rpartition(".")[2].lstrip("-"), list(known)
    near = [each for each in names if each.rpartition(".")[2] == leaf] or get_close_matches(name, names, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""
