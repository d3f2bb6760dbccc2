"""The command line of a run: preset, then TOML file, then options; every setting of the tree is one.

argparse reads the settings that people use first, because some of them choose the preset. tyro reads all others.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from apex.config.arguments import Formatter, Parser, reader_may_leave
from apex.config.codec import dump_toml, flatten, from_dict, lay_over, read_toml
from apex.config.presets import DEFAULT, PRESETS, EnvironmentKind, preset_for
from apex.config.tree import Config, EnvironmentConfig
from apex.config.validation import did_you_mean, from_text
from apex.errors import ConfigError, require


class Short(NamedTuple):
    """A setting that people use first."""

    setting: str
    metavar: str  # stands for its value in --help; a switch has none
    help: str


SHORT_NAMES = {
    "env": Short("environment.id", "ID", "Atari game, Gymnasium id or package.module:factory; chooses the preset"),
    "actors": Short("actor.num_actors", "N", "environment streams that explore; 0: by the machine"),
    "device": Short("learner.device", "DEVICE", "where the learner computes: auto, cpu or cuda"),
    "batch-size": Short("learner.batch_size", "N", "transitions of an update; 0: by the machine"),
    "network": Short("network.factory", "FACTORY", "Q-network of your own: package.module:factory"),
    "stop-score": Short("run.stop_score", "SCORE", "end when an evaluation's mean score reaches this; none: never"),
    "max-minutes": Short("run.max_minutes", "M", "end after this long"),
    "max-steps": Short("run.max_steps", "N", "end after this many steps of all actors"),
    "max-updates": Short("run.max_updates", "N", "end after this many updates"),
    "name": Short("run.name", "NAME", "name of the run folder (default: environment and time)"),
    "single-process": Short("run.single_process", "", "all roles in one process: one seed, one curve"),
    "insecure-no-auth": Short("transport.insecure_no_auth", "", "serve other hosts without keys"),
}

Tree = dict[str, Any]


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    kind: Callable[[EnvironmentConfig], EnvironmentKind],
    means_gpu: Callable[[object], bool],
    base: Config | None = None,
    own: Sequence[Parser] = (),
) -> Config:
    """Returns the tree that the options describe; raises ConfigError for what it does not understand.

    `kind` tells what an environment shows, and `means_gpu` whether a `learner.device` is a GPU of this host. Both are
    called only where an environment is named and no preset is. `base` replaces the preset. `own` has the options that
    the program has read itself, for --help. --help, --help-all and --print-config print and end the program.
    """
    parser = _make_parser(prog, description, own)
    options, rest = parser.parse_known_args([_with_hyphens(word) if word.startswith("--") else word for word in argv])
    require(base is None or options.preset is None, "--preset: a run keeps its own configuration, leave that out")
    file, typed = read_toml(options.config) if options.config else {}, _read_short_names(options)
    asked = lay_over(lay_over(Config(), file), typed)
    if options.preset is not None:
        base = PRESETS[options.preset].config
    elif base is None:
        base = _choose_base(asked, file, typed, kind, means_gpu)
    default = lay_over(lay_over(base, file), typed)
    if options.help_all:
        with reader_may_leave(), suppress(SystemExit):
            _read_settings(["--help"], default, prog, description)
        raise SystemExit(0)
    # Without other options there is no need to wait 0.2 s for tyro.
    config = _read_settings(rest, default, prog, description) if rest else from_dict({}, default)
    if options.print_config:
        with reader_may_leave():
            print(dump_toml(config, Config()), end="")
        raise SystemExit(0)
    return config


def trains_on_gpu(config: Config, means_gpu: Callable[[object], bool]) -> bool:
    """Whether a learner of this host computes on a GPU."""
    return not config.run.single_process and means_gpu(config.learner.device)


def _make_parser(prog: str, description: str, own: Sequence[Parser]) -> Parser:
    """Reads what chooses a preset, and the settings that people use first by their short and long names."""
    names = "\n".join(f"  {name:<12} {preset.summary}" for name, preset in PRESETS.items())
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--preset NAME] [--config FILE] [OPTIONS]",
        description=description,
        epilog=f"presets:\n{names}",
        formatter_class=Formatter,
        parents=own,
    )
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="settings to begin with; see below")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, as --print-config prints them")
    for short, (setting, metavar, text) in SHORT_NAMES.items():
        long = _with_hyphens(f"--{setting}")
        for option, about in ((f"--{short}", text), (long, argparse.SUPPRESS)):
            how: Any = {"metavar": metavar} if metavar else {"action": "store_true", "default": None}
            parser.add_argument(option, dest=setting, help=about, **how)
    parser.add_argument("--print-config", action="store_true", help="print all settings of the run, and end")
    parser.add_argument("--help-all", action="store_true", help="list every setting, and end")
    return parser


def _with_hyphens(word: str) -> str:
    """An option or setting as --help spells it."""
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value


def _read_short_names(options: argparse.Namespace) -> Tree:
    """The settings among the options that argparse has read."""
    tree: Tree = {}
    for setting, *_ in SHORT_NAMES.values():
        value = getattr(options, setting)
        if value is not None:
            branch, _, name = setting.partition(".")
            hint = Config.field_types()[branch].field_types()[name]
            tree.setdefault(branch, {})[name] = from_text(hint, value) if isinstance(value, str) else value
    return tree


def _choose_base(
    asked: Config,
    file: Tree,
    typed: Tree,
    kind: Callable[[EnvironmentConfig], EnvironmentKind],
    means_gpu: Callable[[object], bool],
) -> Config:
    """The settings under file and options if no preset is named."""
    if set(Config.field_types()) <= set(file):  # A file with every table, as --print-config prints it, stands alone.
        return Config()
    if not any("id" in tree.get("environment", {}) for tree in (file, typed)):
        return PRESETS[DEFAULT].config
    name = asked.environment.id
    return preset_for(kind(EnvironmentConfig(id=name)), name, gpu=lambda: trains_on_gpu(asked, means_gpu))


def _read_settings(words: Sequence[str], default: Config, prog: str, description: str) -> Config:
    """Returns `default` with the settings that `words` give; --help among them lists every one and ends the program."""
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def leave_refusals_to_the_constructor(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is bool or is_dataclass(info.type):
            return None
        choices = get_args(info.type) if get_origin(info.type) is Literal else ()
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="|".join(choices) or {int: "N", str: "TEXT"}.get(info.type, "X"),
            instance_from_str=lambda texts: from_text(info.type, texts[0]),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [str(value)],
        )

    box = io.StringIO()
    try:
        with redirect_stderr(box):
            config, unknown = tyro.cli(
                Config,
                prog=prog,
                description=description,
                args=words,
                default=default,
                return_unknown_args=True,
                registry=registry,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise _refusal(end, box.getvalue()) from None
    if unknown:
        raise ConfigError(_unknown(unknown[0], prog))
    return config


def _unknown(word: str, prog: str) -> str:
    word, *_ = word.split("=")
    if word in PRESETS:
        return f"unexpected {word!r}; did you mean --preset {word}?"
    if not word.startswith("--"):
        return f"unexpected {word!r}: options begin with --, and {prog} --help lists them"
    known = [f"--{_with_hyphens(name)}" for name in (*flatten(Config()), *SHORT_NAMES, "preset", "config")]
    return f"unknown option {word}{did_you_mean(word, known) or f'; {prog} --help-all lists all'}"


def _refusal(end: BaseException | None, box: str) -> ConfigError:
    """The ConfigError of a constructor that has made tyro end, or else the first paragraph in tyro's box."""
    while end is not None:
        if isinstance(end, ConfigError):
            return end
        end = end.__context__
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    return ConfigError(" ".join(takewhile(lambda line: line.strip("─"), lines)))
