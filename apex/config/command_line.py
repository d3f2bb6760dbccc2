"""The command line of a run. Every setting is an option; options override the TOML file, which overrides the preset.

argparse reads the most used settings, because some of them choose the preset. tyro reads all others.
"""

from __future__ import annotations

import argparse
import io
import json
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
    """A frequently used setting, which --help lists under a short name."""

    setting: str
    metavar: str  # placeholder of the value in --help; empty for a switch
    help: str


SHORT_NAMES = {
    "env": Short("environment.id", "ID", "Atari game, Gymnasium id or package.module:factory; chooses the preset"),
    "actors": Short("actor.num_actors", "N", "environment streams that explore; 0: chosen for this machine"),
    "device": Short("learner.device", "DEVICE", "where the learner computes: auto, cpu or cuda"),
    "batch-size": Short("learner.batch_size", "N", "transitions per update; 0: chosen for this machine"),
    "network": Short("network.factory", "FACTORY", "your own network: package.module:factory"),
    "stop-score": Short(
        "run.stop_score", "SCORE", "end when 100 new games confirm a mean score above this; none: never"
    ),
    "max-minutes": Short("run.max_minutes", "M", "end after M minutes"),
    "max-steps": Short("run.max_steps", "N", "end after N steps of all actors together"),
    "max-updates": Short("run.max_updates", "N", "end after N gradient steps"),
    "name": Short("run.name", "NAME", "name of the run folder (default: environment and time)"),
    "head": Short("run.head", "", "run no actors on this host; on other hosts, run: apex actor --learner HOST"),
    "single-process": Short(
        "run.single_process", "", "run all roles in one process: the same seed gives the same curve"
    ),
    "insecure-no-auth": Short("transport.insecure_no_auth", "", "accept connections from other hosts without keys"),
}

ENV_ARG = "argument of gymnasium.make or of the factory; the value is JSON or text; may be repeated"

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
    """Returns the configuration that the options describe; raises ConfigError for unknown options and bad values.

    `kind` returns the kind of an environment, `means_gpu` whether a `learner.device` is a GPU of this host. Both are
    called only if an environment is given without a preset. `base` replaces the preset. `own`: parsers of the caller's
    own options, which --help lists too. --help, --help-all and --print-config print their text and raise SystemExit.
    """
    parser = _make_parser(prog, description, own)
    options, rest = parser.parse_known_args([_with_hyphens(word) if word.startswith("--") else word for word in argv])
    require(base is None or options.preset is None, "a resumed run keeps its own configuration: leave --preset out")
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
    # Importing tyro takes 0.2 s, so it is skipped if no other options are given.
    config = _read_settings(rest, default, prog, description) if rest else from_dict({}, default)
    if options.print_config:
        with reader_may_leave():
            print(dump_toml(config, Config()), end="")
        raise SystemExit(0)
    return config


def trains_on_gpu(config: Config, means_gpu: Callable[[object], bool]) -> bool:
    """Returns whether a learner on this host computes on a GPU."""
    return not config.run.single_process and means_gpu(config.learner.device)


def _make_parser(prog: str, description: str, own: Sequence[Parser]) -> Parser:
    """Returns a parser of the options that choose a preset, and of SHORT_NAMES under both short and long names."""
    names = "\n".join(f"  {name:<12} {preset.summary}" for name, preset in PRESETS.items())
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--preset NAME] [--config FILE] [OPTIONS]",
        description=description,
        epilog=f"presets:\n{names}",
        formatter_class=Formatter,
        parents=own,
    )
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="start from this preset; see the list below")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read settings from a TOML file in the format of --print-config"
    )
    for short, (setting, metavar, text) in SHORT_NAMES.items():
        long = _with_hyphens(f"--{setting}")
        for option, about in ((f"--{short}", text), (long, argparse.SUPPRESS)):
            how: Any = {"metavar": metavar} if metavar else {"action": "store_true", "default": None}
            parser.add_argument(option, dest=setting, help=about, **how)
    parser.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE", help=ENV_ARG)
    parser.add_argument("--print-config", action="store_true", help="print every setting of the run and exit")
    parser.add_argument("--help-all", action="store_true", help="list every setting and exit")
    return parser


def _with_hyphens(word: str) -> str:
    """Returns an option or setting with hyphens instead of underscores in its name; its value stays unchanged."""
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value


def _read_short_names(options: argparse.Namespace) -> Tree:
    """Returns the settings among the options that argparse has parsed."""
    tree: Tree = {}
    for setting, *_ in SHORT_NAMES.values():
        value = getattr(options, setting)
        if value is not None:
            branch, _, name = setting.partition(".")
            hint = Config.field_types()[branch].field_types()[name]
            tree.setdefault(branch, {})[name] = from_text(hint, value) if isinstance(value, str) else value
    if options.env_arg:
        tree.setdefault("environment", {})["args"] = read_env_args(options.env_arg)
    return tree


def read_env_args(words: Sequence[str]) -> Tree:
    """Converts KEY=VALUE words to arguments of an environment; raises ConfigError for a word without `=`."""
    args: Tree = {}
    for word in words:
        name, equals, text = word.partition("=")
        require(bool(equals and name), f"--env-arg must be KEY=VALUE, got {word!r}", ConfigError)
        try:
            args[name] = json.loads(text)
        except ValueError:
            args[name] = text
    return args


def _choose_base(
    asked: Config,
    file: Tree,
    typed: Tree,
    kind: Callable[[EnvironmentConfig], EnvironmentKind],
    means_gpu: Callable[[object], bool],
) -> Config:
    """Returns the configuration to which file and options are applied if no preset is given."""
    if set(Config.field_types()) <= set(file):  # The file has every table, as from --print-config.
        return Config()
    if not any("id" in tree.get("environment", {}) for tree in (file, typed)):
        return PRESETS[DEFAULT].config
    name = asked.environment.id
    return preset_for(
        kind(EnvironmentConfig(id=name, args=asked.environment.args)), name, gpu=lambda: trains_on_gpu(asked, means_gpu)
    )


def _read_settings(words: Sequence[str], default: Config, prog: str, description: str) -> Config:
    """Returns `default` updated with the options in `words`; --help prints every setting and raises SystemExit."""
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
        return f"unexpected argument {word!r}; did you mean --preset {word}?"
    if not word.startswith("--"):
        return f"unexpected argument {word!r}: options begin with --; run {prog} --help for a list"
    known = [f"--{_with_hyphens(name)}" for name in (*flatten(Config()), *SHORT_NAMES, "env-arg", "preset", "config")]
    return f"unknown option {word}{did_you_mean(word, known) or f'; run {prog} --help-all for a list'}"


def _refusal(end: BaseException | None, box: str) -> ConfigError:
    """Returns the ConfigError that made tyro exit, or else a ConfigError with the first paragraph of tyro's message."""
    while end is not None:
        if isinstance(end, ConfigError):
            return end
        end = end.__context__
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    return ConfigError(" ".join(takewhile(lambda line: line.strip("─"), lines)))
