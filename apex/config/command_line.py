"""The command line of a run: preset, then TOML file, then options; every setting of the tree is one.

What was typed becomes the same tree of values that a TOML file is, and goes through the same door, `config.from_dict`:
there is one check and one wording for both. tyro renders --help from the dataclasses and the comments in them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from apex.config import Config, EnvironmentConfig, dump_toml, flatten, from_dict, read_toml
from apex.config.presets import DEFAULT, PRESETS, EnvironmentKind, preset_for
from apex.errors import ConfigError, require

SHORT_NAMES = {
    "env": "environment.id",
    "actors": "actor.num_actors",
    "name": "run.name",
    "stop-score": "run.stop_score",
    "max-minutes": "run.max_minutes",
    "max-steps": "run.max_steps",
    "max-updates": "run.max_updates",
    "single-process": "run.single_process",
    "device": "learner.device",
    "batch-size": "learner.batch_size",
    "network": "network.factory",
    "insecure-no-auth": "transport.insecure_no_auth",
}
HELP = ("-h", "--help")
# Which a whole file of before lacks; their defaults are as it was.
LATER_SETTINGS = {
    "environment.fire_after_life_loss",
    "learner.learning_rate_updates",
    "learner.final_learning_rate_share",
}

Tree = dict[str, Any]


class Setting(NamedTuple):
    """What an option sets."""

    name: str  # dotted, as in the tree
    type: Any  # its annotation
    negated: bool = False  # --section.no-setting: sets it to false, and takes no value


class Typed(NamedTuple):
    """What a command line says."""

    preset: str | None
    file: Path | None
    tree: Tree  # only what was typed
    print_config: bool


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    kind: Callable[[EnvironmentConfig], EnvironmentKind],
    means_gpu: Callable[[object], bool],
) -> Config:
    """Returns the tree that the options describe; raises ConfigError for what it does not understand.

    `kind` tells what an environment shows, and `means_gpu` whether a `learner.device` is a GPU of this host. Both are
    called only where an environment is named and no preset is. --help and --print-config print, and end the program
    with status 0.
    """
    if any(word in HELP for word in argv):
        try:
            config = _resolve(_read_options([word for word in argv if word not in HELP]), kind, means_gpu)
        except ConfigError:  # Whoever asks for help may have typed half of the rest.
            config = PRESETS[DEFAULT].config
        _print_help(config, prog, description)
        raise SystemExit(0)
    typed = _read_options(argv)
    config = _resolve(typed, kind, means_gpu)
    if typed.print_config:
        with reader_may_leave():
            print(describe_config(config), end="")
        raise SystemExit(0)
    return config


def describe_config(config: Config) -> str:
    """The tree as TOML that --config reads; a value that is not the default has the default beside it."""
    values, defaults = flatten(config), flatten(Config())
    differing = {name for name, value in values.items() if value != defaults[name]}
    lines = [f"# {len(differing)} of {len(values)} settings differ from the defaults, which are the paper's."]
    branch = ""
    for line in dump_toml(config).splitlines():
        if line.startswith("["):
            branch = line.strip("[]") + "."
        name = branch + line.partition(" = ")[0]
        if name in differing:
            default = "none" if defaults[name] is None else json.dumps(defaults[name])
            line = f"{line:<38}  # default: {default}"
        lines.append(line)
    return "\n".join(lines) + "\n"


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within it, whoever reads standard output may close it early: `apex train --help | head` is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The interpreter flushes once more at its end.


def _resolve(
    typed: Typed, kind: Callable[[EnvironmentConfig], EnvironmentKind], means_gpu: Callable[[object], bool]
) -> Config:
    file = read_toml(typed.file) if typed.file else {}
    tree = _lay_over(file, typed.tree)
    if typed.preset is not None:
        known = ", ".join(PRESETS)
        require(typed.preset in PRESETS, f"--preset must be one of {known}, got {typed.preset!r}")
        return from_dict(tree, PRESETS[typed.preset].config)
    if _is_whole(file):  # As --print-config prints it: what it leaves out is none, whatever a preset says.
        return from_dict(tree)
    name = _branch(tree, "environment").get("id")
    if name and isinstance(name, str):
        return from_dict(
            tree, preset_for(kind(EnvironmentConfig(id=name)), name, gpu=lambda: trains_on_gpu(tree, means_gpu))
        )
    return from_dict(tree, PRESETS[DEFAULT].config)


def trains_on_gpu(tree: Tree, means_gpu: Callable[[object], bool]) -> bool:
    """Whether a learner of this host will compute on a GPU, as far as the settings of `tree` tell."""
    return not _branch(tree, "run").get("single_process") and means_gpu(_branch(tree, "learner").get("device"))


def _branch(tree: Tree, name: str) -> Tree:
    """A branch of the tree; {} for what is none, which from_dict refuses."""
    branch = tree.get(name)
    return branch if isinstance(branch, dict) else {}


def _lay_over(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where both have a setting, `above` wins. A branch that is no table is left for from_dict."""
    merged = dict(below)
    for name, value in above.items():
        branch = below.get(name)
        merged[name] = {**branch, **value} if isinstance(branch, dict) and isinstance(value, dict) else value
    return merged


def _is_whole(tree: Tree) -> bool:
    """Whether every setting that can be written down is in `tree`, but for those that came later."""
    flat = set(tree) | LATER_SETTINGS
    for name, branch in tree.items():
        if isinstance(branch, dict):
            flat |= {f"{name}.{setting}" for setting in branch}
    return all(name in flat for name, default in flatten(Config()).items() if default is not None)


def _read_options(argv: Sequence[str]) -> Typed:
    """Tells options from values; a later option wins over an earlier one."""
    settings = _settings()
    spellings = [*settings, "preset", "config", "print-config"]
    tree: Tree = {}
    preset: str | None = None
    file: Path | None = None
    print_config = False
    words = list(reversed(argv))
    while words:
        option, equals, text = words.pop().partition("=")
        if not option.startswith("--"):
            raise ConfigError(_stray(option))
        name = option[2:].replace("_", "-")
        if name not in spellings:
            raise ConfigError(_unknown(option, name, spellings))
        given: str | None = text if equals else None
        takes_value = name != "print-config" and not (name in settings and settings[name].negated)
        if takes_value and not equals and words and not words[-1].startswith("--"):
            given = words.pop()
        require(takes_value or given is None, f"{option} takes no value, got {text!r}")
        if given is None and takes_value and not (name in settings and settings[name].type is bool):
            raise ConfigError(f"{option} needs a value")
        if name == "preset":
            preset = given
        elif name == "config":
            file = Path(given or "")
        elif name == "print-config":
            print_config = True
        else:
            setting = settings[name]
            value = not setting.negated if given is None else _parse(given, setting.type)
            if name == "actors" and isinstance(value, int):
                require(value >= 1, f"--actors must be >= 1, got {value}")
            branch, dot, leaf = setting.name.rpartition(".")
            (tree.setdefault(branch, {}) if dot else tree)[leaf] = value
    return Typed(preset, file, tree, print_config)


def _settings() -> dict[str, Setting]:
    """Every option that sets a setting, by its spelling without the leading dashes."""
    tree = Config()
    settings: dict[str, Setting] = {}
    types: dict[str, Any] = {}
    for item in fields(tree):
        branch = getattr(tree, item.name)
        if not is_dataclass(branch):
            types[item.name] = get_type_hints(Config)[item.name]
            continue
        for leaf, annotation in get_type_hints(type(branch)).items():
            types[f"{item.name}.{leaf}"] = annotation
            if annotation is bool:
                settings[f"{item.name}.no-{leaf}".replace("_", "-")] = Setting(
                    f"{item.name}.{leaf}", bool, negated=True
                )
    settings |= {name.replace("_", "-"): Setting(name, annotation) for name, annotation in types.items()}
    return settings | {short: Setting(name, types[name]) for short, name in SHORT_NAMES.items()}


def _parse(text: str, annotation: Any) -> Any:
    """The value that `text` stands for. What does not parse stays text, and from_dict refuses it by name."""
    allowed = get_args(annotation) or (annotation,)
    if NoneType in allowed and text.lower() == "none":
        return None
    if bool in allowed:
        return {"true": True, "false": False}.get(text.lower(), text)
    for number in (int, float):
        if number in allowed:
            with suppress(ValueError):
                return number(text)
    return text


def _stray(word: str) -> str:
    if word in PRESETS:
        return f"unexpected {word!r}; did you mean --preset {word}?"
    return f"unexpected {word!r}: options begin with --, and --help lists them"


def _unknown(option: str, name: str, spellings: Iterable[str]) -> str:
    """Says what was meant, if it is near: a setting may also lack its branch, as in --capacity."""
    branch, _, leaf = name.rpartition(".")
    siblings = [spelling for spelling in spellings if branch and spelling.startswith(f"{branch}.")]
    near: dict[str, list[str]] = {}
    for spelling in siblings or spellings:
        for key in {spelling.rpartition(".")[2]} if siblings else {spelling, spelling.rpartition(".")[2]}:
            near.setdefault(key, []).append(f"--{spelling}")
    for match in get_close_matches(leaf if siblings else name, near, n=1, cutoff=0.7):
        return f"unknown option {option}; did you mean {' or '.join(near[match])}?"
    if siblings:
        there = [f"--{spelling}" for spelling in siblings if not spelling.startswith(f"{branch}.no-")]
        return f"unknown option {option}; there are {', '.join(there)}"
    return f"unknown option {option}; --help lists them all"


def _print_help(config: Config, prog: str, description: str) -> None:
    import tyro  # 60 ms that nothing else needs

    lines = [
        description,
        "",
        "A preset comes first, then --config, then what is typed. --env alone picks the preset.",
        "",
    ]
    lines += ["presets (--preset NAME)"]
    lines += [f"  {name:<12} {preset.summary}" for name, preset in PRESETS.items()]
    lines += ["", "short names"]
    lines += [f"  --{short:<12} --{name.replace('_', '-')}" for short, name in SHORT_NAMES.items()]
    lines += ["", "and"]
    lines += [
        "  --config FILE    TOML, as --print-config prints it",
        "  --print-config   shows what would run, and ends",
    ]
    with reader_may_leave(), suppress(SystemExit):
        tyro.cli(Config, prog=prog, description="\n".join(lines), default=config, args=["--help"])
