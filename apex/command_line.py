"""The command line of a run. Every setting is an option; options override the TOML file, which overrides the preset."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from apex.config.arguments import Formatter, Parser, reader_may_leave
from apex.config.codec import dump_toml, flatten, from_dict, lay_over, read_toml
from apex.config.presets import DEFAULT, PRESETS, preset_for
from apex.config.tree import Config, EnvironmentConfig
from apex.config.validation import Branch, describe, did_you_mean, from_text, plain_type
from apex.environments.factory import kind
from apex.errors import ConfigError, require
from apex.runtime.gpu import means_gpu


class Short(NamedTuple):
    """A frequently used setting, which --help lists under a short name."""

    setting: str
    metavar: str  # placeholder of the value in --help; empty for a switch
    help: str


SHORT_NAMES = {
    "env": Short("environment.id", "ID", "Atari game, Gymnasium id or package.module:factory; chooses the preset"),
    "actors": Short("actor.num_actors", "N", "number of actors, each with its own game; 0: chosen for this machine"),
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

BRANCHES: dict[str, type[Branch]] = {"": Config} | {
    name: annotation
    for name, annotation in Config.field_types().items()
    if isinstance(annotation, type) and issubclass(annotation, Branch)
}


def choose_preset(asked: Config) -> Config:
    """Returns the preset for the environment and the device of `asked`; creates the environment to see its kind."""

    def on_gpu() -> bool:
        return not asked.run.single_process and means_gpu(asked.learner.device)

    name = asked.environment.id
    return preset_for(kind(EnvironmentConfig(id=name, args=asked.environment.args)), name, gpu=on_gpu)


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str = "",
    base: Config | None = None,
    own: Sequence[Parser] = (),
    choose: Callable[[Config], Config] = choose_preset,
) -> Config:
    """Returns the configuration that the options describe; raises ConfigError for unknown options and bad values.

    `base` replaces the preset. `choose` returns the preset if an environment is given without a preset; its argument
    has the settings of the file and the options. `own`: parsers of the caller's own options, which --help lists too.
    --help, --help-all and --print-config print their text and raise SystemExit.
    """
    parser = _make_parser(prog, description, own)
    options, unknown = parser.parse_known_args([_with_hyphens(arg) if arg.startswith("--") else arg for arg in argv])
    require(
        base is None or options.preset is None,
        "a resumed run keeps its own configuration, so it cannot use --preset",
        ConfigError,
        remedy="leave --preset out",
    )
    if unknown:
        raise _unknown_option(unknown[0], prog)
    file, typed = read_toml(options.config) if options.config else {}, _typed_settings(options)
    asked = lay_over(lay_over(base or Config(), file), typed)
    if options.env_arg:
        args = {**asked.environment.args, **read_env_args(options.env_arg)}
        typed.setdefault("environment", {})["args"] = args
        asked = lay_over(asked, typed)
    if options.preset is not None:
        base = PRESETS[options.preset].config
    elif base is None and set(Config.field_types()) <= set(file):  # Every table, as --print-config writes them.
        base = Config()
    elif base is None:
        has_environment = any("id" in tree.get("environment", {}) for tree in (file, typed))
        base = choose(asked) if has_environment else PRESETS[DEFAULT].config
    config = lay_over(lay_over(base, file), typed)
    if options.help_all:
        _make_parser(prog, description, own, shown=config).print_help()
        raise SystemExit(0)
    config = from_dict({}, config)
    if options.print_config:
        with reader_may_leave():
            print(dump_toml(config, Config()), end="")
        raise SystemExit(0)
    return config


def read_env_args(texts: Sequence[str]) -> Tree:
    """Converts KEY=VALUE texts to arguments of an environment; raises ConfigError for a text without `=`."""
    args: Tree = {}
    for each in texts:
        name, equals, text = each.partition("=")
        require(bool(equals and name), f"--env-arg must be KEY=VALUE, got {each!r}", ConfigError)
        try:
            args[name] = json.loads(text)
        except ValueError:
            args[name] = text
    return args


class _Switch(argparse.Action):
    """Sets a setting to False if the option is --BRANCH.no-NAME, else to True."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: Any, options: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(options, self.dest, ".no-" not in str(option))


class _ListFormatter(Formatter):
    """Formats --help-all: each option on a line of its own, with its help indented below."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for each in text.splitlines() for line in textwrap.wrap(each, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(f"{textwrap.indent(textwrap.fill(each, width), indent)}\n" for each in text.splitlines())


def _make_parser(prog: str, description: str, own: Sequence[Parser], shown: Config | None = None) -> Parser:
    """Returns a parser of every option. Its --help lists SHORT_NAMES; with `shown`, also all settings with its values.

    Settings that are not given are missing in the parsed options, because None is a value.
    """
    names = "\n".join(f"  {name:<12} {preset.summary}" for name, preset in PRESETS.items())
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--preset NAME] [--config FILE] [OPTIONS]",
        description=description,
        epilog=f"presets:\n{names}",
        formatter_class=_ListFormatter if shown else Formatter,
        parents=own,
    )
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="start from this preset; see the list below")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read settings from a TOML file in the format of --print-config"
    )
    for short, (setting, metavar, text) in SHORT_NAMES.items():
        branch, _, name = setting.rpartition(".")
        _add_setting(parser, f"--{short}", setting, BRANCHES[branch].field_types()[name], metavar, text)
    parser.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE", help=ENV_ARG)
    parser.add_argument("--print-config", action="store_true", help="print every setting of the run and exit")
    parser.add_argument("--help-all", action="store_true", help="list every setting and exit")
    for prefix, each in BRANCHES.items():
        _add_branch(parser, prefix, each, shown)
    return parser


def _add_branch(parser: Parser, prefix: str, branch: type[Branch], shown: Config | None) -> None:
    """Adds an option for each setting of a branch; --help describes them with the values of `shown`."""
    group: Any = parser.add_argument_group(prefix or "general", inspect.getdoc(branch)) if shown else parser
    comments = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(branch) if shown else "", re.MULTILINE))
    values = flatten(shown) if shown else {}
    for name, annotation in branch.field_types().items():
        if annotation not in BRANCHES.values():
            setting = f"{prefix}.{name}".lstrip(".")
            text = _describe_setting(comments[name], annotation, values[setting]) if shown else argparse.SUPPRESS
            _add_setting(group, _with_hyphens(f"--{setting}"), setting, annotation, _placeholder(annotation), text)


def _add_setting(group: Any, option: str, setting: str, annotation: Any, metavar: str, text: str) -> None:
    """Adds an option for a setting. The parser converts the value; `Config` checks it."""
    how: Any = (
        {"action": _Switch} if annotation is bool else {"type": partial(from_text, annotation), "metavar": metavar}
    )
    opposite = [option.replace(".", ".no-")] if annotation is bool and "." in option else []
    group.add_argument(option, *opposite, dest=setting, default=argparse.SUPPRESS, help=text, **how)


def _placeholder(annotation: Any) -> str:
    plain = plain_type(annotation)
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    return {int: "N", str: "TEXT"}.get(plain, "JSON" if get_origin(plain) is dict else "X")


def _describe_setting(comment: str, annotation: Any, value: Any) -> str:
    """Returns the help text of a setting: its comment, and on a second line the present value and the allowed ones."""
    if annotation is bool:
        limits = f"default: {'on' if value else 'off'}"
    else:
        allowed = "" if get_origin(plain_type(annotation)) is Literal else f"; {describe(annotation)}"
        limits = f"default: {'none' if value is None else value if value != '' else 'empty'}{allowed}"
    return f"{comment}\n{limits}".replace("%", "%%")


def _with_hyphens(argument: str) -> str:
    """Returns an option or setting with hyphens instead of underscores in its name; its value stays unchanged."""
    option, equals, value = argument.partition("=")
    return option.replace("_", "-") + equals + value


def _typed_settings(options: argparse.Namespace) -> Tree:
    """Returns the settings among the parsed options."""
    tree: Tree = {}
    known = flatten(Config())
    for setting, value in vars(options).items():
        if setting in known:
            branch, _, name = setting.rpartition(".")
            (tree.setdefault(branch, {}) if branch else tree)[name] = value
    return tree


def _unknown_option(argument: str, prog: str) -> ConfigError:
    name, *_ = argument.split("=")
    if not name.startswith("--"):
        remedy = f"write --preset {name}" if name in PRESETS else f"run {prog} --help for a list of options"
        return ConfigError(f"unexpected argument {name!r}: options begin with --", remedy)
    known = [f"--{_with_hyphens(each)}" for each in (*flatten(Config()), *SHORT_NAMES, "env-arg", "preset", "config")]
    return ConfigError(f"unknown option {name}", did_you_mean(name, known) or f"run {prog} --help-all for a list")
