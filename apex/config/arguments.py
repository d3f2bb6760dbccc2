"""Argument parsing for every command: mistakes raise ConfigError, and option values are checked like settings."""

import argparse
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TextIO

from apex.config.validation import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    checked,
    did_you_mean,
    from_text,
)
from apex.errors import ConfigError
from apexreplay.errors import require


class Formatter(argparse.HelpFormatter):
    """Formats --help in at most 100 columns and keeps line breaks."""

    def __init__(self, prog: str, *, max_help_position: int = 30) -> None:
        width = min(100, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=max_help_position, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for each in text.splitlines() for line in textwrap.wrap(each, width) or [""]]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for a mistake; plain argparse prints the usage and exits instead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with the mistake and the command that lists the options."""
        raise ConfigError(message, f"run {self.prog} --help for a list of options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ConfigError unless the option has this choice; argparse suggests no similar one."""
        choices = [str(each) for each in action.choices or ()]
        if choices and value not in (action.choices or ()):
            name = "/".join(action.option_strings) or str(action.metavar or action.dest)
            remedy = did_you_mean(str(value), choices)
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", remedy)

    def print_help(self, file: Any = None) -> None:
        """Prints the options; a closed pipe is not an error. Within `collect_options`, collects their names instead."""
        if (collected := _collected.get()) is not None:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            collected.update(name for action in shown for name in action.option_strings if name.startswith("--"))
            return
        with reader_may_leave():
            super().print_help(file)


_collected: ContextVar[set[str] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_options() -> Iterator[set[str]]:
    """Yields a set. A parser that would print its help during the context adds its long options to the set instead."""
    options: set[str] = set()
    token = _collected.set(options)
    try:
        yield options
    finally:
        _collected.reset(token)


def value_of(annotation: Any) -> Callable[[str], Any]:
    """Returns an argparse `type` function that converts text to `annotation` and checks the range."""

    def read(text: str) -> Any:
        try:
            return checked("", annotation, from_text(annotation, text))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from error

    return read


positive_int = value_of(PositiveInt)
non_negative_int = value_of(NonNegativeInt)
finite_float = value_of(float)
positive_float = value_of(PositiveFloat)
probability = value_of(Probability)
seed = value_of(Seed)
MAX_SEEDS = 1_000  # of one command


def seeds(text: str) -> list[int]:
    """Converts a list such as 1-5 or 1,4,9 to seeds; an argparse `type` function."""
    found: list[int] = []
    for first, hyphen, last in (part.partition("-") for part in text.split(",")):
        found += range(seed(first), min(seed(last if hyphen else first), seed(first) + MAX_SEEDS) + 1)
    if not 0 < len({*found}) == len(found) <= MAX_SEEDS:
        raise argparse.ArgumentTypeError(
            f"must be 1 to {MAX_SEEDS} different seeds, such as 1-5 or 1,4,9, got {text!r}"
        )
    return found


def check_out(path: Path, *suffixes: str, option: str = "--out") -> None:
    """Raises UsageError if `path` cannot be written to, or if it ends in none of the suffixes."""
    require(path.suffix.lower() in suffixes, f"{option} must end in {' or '.join(suffixes)}, got {path}")
    require(path.parent.is_dir(), f"{option} {path}: there is no folder {path.parent}", remedy="create it")
    require(not path.is_dir(), f"{option} must be a file, but {path} is a folder")
    require(os.access(path.parent, os.W_OK), f"{option} {path}: the folder is not writable", remedy="choose another")


@contextmanager
def reader_may_leave(stream: TextIO | None = None) -> Iterator[None]:
    """Returns a context that drops output to `stream` (default: standard output) if its pipe or terminal is closed."""
    stream = stream or sys.stdout
    try:
        yield
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with suppress(OSError):  # The stream has no descriptor.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, stream.fileno())  # The interpreter flushes the stream again when it exits.
            os.close(silence)
