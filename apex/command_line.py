"""The command line of a run. Every setting is an option; options override the TOML file, which overrides the preset."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from apex.config.arguments import Formatter, Parser, reader_may_leave
from apex.config.built_in import OWN_SETTINGS
from apex.config.codec import RETIRED, dump_toml, flatten, from_dict, lay_over, read_toml, unflatten
from apex.config.presets import DEFAULT, PRESETS, preset_for
from apex.config.tree import Config
from apex.config.validation import Branch, describe, did_you_mean, from_text, plain_type, require_setting
from apex.environments.factory import kind
from apex.environments.foreign import require_trust
from apex.environments.inspection import Inspector
from apex.errors import ConfigError
from apex.runtime.gpu import means_gpu

# Frequently used settings, which --help lists under a short name.
SHORT_NAMES = {
    "env": "environment.id",
    "actors": "actor.num_actors",
    "device": "learner.device",
    "batch-size": "learner.batch_size",
    "network": "network.factory",
    "init-from": "learner.init_from",
    "freeze": "learner.freeze",
    "stop-score": "run.stop_score",
    "max-minutes": "run.max_minutes",
    "max-steps": "run.max_steps",
    "max-updates": "run.max_updates",
    "name": "run.name",
    "head": "run.head",
    "single-process": "run.single_process",
    "insecure-no-auth": "transport.insecure_no_auth",
}

ENV_ARG = "argument of gymnasium.make or of the factory; the value is JSON or text; may be repeated"

Tree = dict[str, Any]

BRANCHES: dict[str, type[Branch]] = {"": Config} | {
    name: annotation
    for name, annotation in Config.field_types().items()
    if isinstance(annotation, type) and issubclass(annotation, Branch)
}
SETTINGS: dict[str, Any] = {  # every setting -> its annotation
    f"{prefix}.{name}".lstrip("."): annotation
    for prefix, branch in BRANCHES.items()
    for name, annotation in branch.field_types().items()
    if annotation not in BRANCHES.values()
}


def choose_preset(asked: Config, inspector: Inspector, gpu: bool | None = None) -> Config:
    """Returns the preset for the environment and the device of `asked`; a child process creates the environment.

    `gpu`: whether the host has a GPU; None: look for one.
    """
    device = asked.learner.device

    def on_gpu() -> bool:
        return not asked.run.single_process and (means_gpu(device) if gpu is None or device != "auto" else gpu)

    return preset_for(kind(asked.environment, inspector.schema(asked)), asked.environment.id, gpu=on_gpu)


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str = "",
    base: Config | None = None,
    own: Sequence[Parser] = (),
    choose: Callable[[Config, Inspector], Config] = choose_preset,
    inspector: Inspector | None = None,
    given: bool = True,
) -> Config:
    """Returns the configuration that the options describe; raises ConfigError for unknown options and bad values.

    `base` replaces the preset. `choose` returns the preset if an environment is given without a preset; its argument
    has the settings of the file and the options. `own`: parsers of the caller's own options, which --help lists too.
    Trusts the modules that the options name (unless `given` is False), but not those that only the file names.
    --help, --help-all and --print-config print their text and raise SystemExit.
    """
    comments = _read_comments() if {"-h", "--help", "--help-all"} & set(argv) else {}
    parser = _make_parser(prog, description, own, comments)
    options, unknown = parser.parse_known_args([_with_hyphens(arg) if arg.startswith("--") else arg for arg in argv])
    require_setting(
        base is None or options.preset is None,
        "a resumed run keeps its own configuration, so it cannot use --preset",
        "leave --preset out",
    )
    if unknown:
        raise _unknown_option(unknown[0], prog)
    file = read_toml(options.config) if options.config else {}
    typed = unflatten({setting: value for setting, value in vars(options).items() if setting in SETTINGS})
    require_trust(lay_over(Config(), typed), given=given)
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
        base = choose(asked, inspector or Inspector()) if has_environment else PRESETS[DEFAULT].config
    config = lay_over(lay_over(base, file), typed)
    if options.help_all:
        _make_parser(prog, description, own, comments, config).print_help()
        raise SystemExit(0)
    config = from_dict({}, config)
    for branch in sorted(set(OWN_SETTINGS) & set(typed) - {config.algorithm}):
        problem = f"only the algorithm {branch!r} reads --{branch}.{_with_hyphens(min(typed[branch]))}"
        require_setting(":" in config.algorithm, problem, f"add --algorithm {branch}, or leave it out")
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
        require_setting(bool(equals and name), f"--env-arg must be KEY=VALUE, got {each!r}")
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


def _make_parser(
    prog: str, description: str, own: Sequence[Parser], comments: dict[str, str], shown: Config | None = None
) -> Parser:
    """Returns a parser of every option. Its --help lists SHORT_NAMES; with `shown`, also all settings with its values.

    `comments`: {setting: its sentence}; may be empty if no help is needed. Settings that are not given are missing in
    the parsed options, because None is a value.
    """
    names = "\n".join(f"  {name:<12} {preset.summary}" for name, preset in PRESETS.items())
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--preset NAME] [--config FILE] [OPTIONS]",
        description=description,
        epilog=f"presets:\n{names}",
        formatter_class=partial(Formatter, max_help_position=8 if shown else 30),
        parents=own,
    )
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="start from this preset; see the list below")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read settings from a TOML file in the format of --print-config"
    )
    for short, setting in SHORT_NAMES.items():
        _add_setting(parser, f"--{short}", setting, comments.get(setting, ""))
    parser.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE", help=ENV_ARG)
    parser.add_argument("--print-config", action="store_true", help="print every setting of the run and exit")
    parser.add_argument("--help-all", action="store_true", help="list every setting and exit")
    groups: dict[str, Any] = dict.fromkeys(BRANCHES, parser)
    if shown:
        groups = {name: parser.add_argument_group(name or "general", each.__doc__) for name, each in BRANCHES.items()}
    values = flatten(shown) if shown else {}
    for setting in SETTINGS:
        text = argparse.SUPPRESS if "." in setting else comments.get(setting, "")  # --help has --seed and --algorithm.
        text = f"{comments[setting]}\n{_limits(setting, values[setting])}" if shown else text
        _add_setting(groups[setting.rpartition(".")[0]], f"--{_with_hyphens(setting)}", setting, text)
    return parser


def _add_setting(group: Any, option: str, setting: str, text: str) -> None:
    """Adds an option for a setting. The parser converts the value; `Config` checks it."""
    annotation = SETTINGS[setting]
    how = {"dest": setting, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if annotation is bool:
        opposite = [option.replace(".", ".no-")] if "." in option else []
        group.add_argument(option, *opposite, action=_Switch, **how)
    else:
        group.add_argument(option, type=partial(from_text, annotation), metavar=_placeholder(annotation), **how)


def _read_comments() -> dict[str, str]:
    """Returns {setting: the comment beside it in the source code}."""
    comments: dict[str, str] = {}
    for prefix, branch in BRANCHES.items():
        # inspect.getsource of a class would parse the whole module for each branch.
        module = inspect.getsource(sys.modules[branch.__module__])
        source = module.partition(f"class {branch.__name__}(")[2].partition("\n\n\n")[0]
        found = re.findall(r"^    (\w+): .*  # (.+)$", source, re.MULTILINE)
        comments |= {f"{prefix}.{name}".lstrip("."): comment for name, comment in found}
    return comments


def _placeholder(annotation: Any) -> str:
    plain = plain_type(annotation)
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    return {int: "N", str: "TEXT"}.get(plain, "JSON" if get_origin(plain) is dict else "X")


def _limits(setting: str, value: Any) -> str:
    """Returns the present value of a setting and the allowed values."""
    annotation = SETTINGS[setting]
    if annotation is bool:
        return f"default: {'on' if value else 'off'}"
    allowed = "" if get_origin(plain_type(annotation)) is Literal else f"; {describe(annotation)}"
    return f"default: {'none' if value is None else value if value != '' else 'empty'}{allowed}"


def _with_hyphens(argument: str) -> str:
    """Returns an option or setting with hyphens instead of underscores in its name; its value stays unchanged."""
    option, equals, value = argument.partition("=")
    return option.replace("_", "-") + equals + value


def _unknown_option(argument: str, prog: str) -> ConfigError:
    name, *_ = argument.split("=")
    if not name.startswith("--"):
        remedy = f"write --preset {name}" if name in PRESETS else f"run {prog} --help for a list of options"
        return ConfigError(f"unexpected argument {name!r}: options begin with --", remedy)
    setting = name.removeprefix("--").replace("-", "_")
    if setting in RETIRED:
        return ConfigError(f"{name} no longer exists: {RETIRED[setting]}", "leave it out")
    known = [f"--{_with_hyphens(each)}" for each in (*SETTINGS, *SHORT_NAMES, "env-arg", "preset", "config")]
    return ConfigError(f"unknown option {name}", did_you_mean(name, known) or f"run {prog} --help-all for a list")
