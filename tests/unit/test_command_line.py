"""The command line of a run: the value of each option, the order of the sources, and refusals."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support.builders import VECTORS

from apex.command_line import SHORT_NAMES, parse_config
from apex.config import (
    Config,
    EnvironmentConfig,
    addresses,
    dpg,
    dump_toml,
    flatten,
    from_dict,
    iqn,
    load_toml,
    r2d2,
    sac,
    to_dict,
    tree,
)
from apex.config.arguments import Parser, check_out
from apex.config.built_in import OWN_SETTINGS
from apex.config.presets import ATARI, CARTPOLE, NARROW, PONG, PRESETS, VECTOR
from apex.environments.inspection import Inspector
from apex.runtime import gpu
from apex.runtime.gpu import Cuda, Gpu
from apexreplay.errors import UsageError


def parse(*arguments, **more):
    return parse_config(arguments, prog="apex train", description="Trains.", **more)


def parsed_value(setting, *arguments):
    return flatten(parse(*arguments))[setting]


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def load_toml_text(tmp_path, text):
    return load_toml(tmp_path / write(tmp_path, text))


def other_value(value):
    """Another value of the same type, in the range of every setting; None if there is no such value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 0.99 if isinstance(value, float) else None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_used_unchanged(name):
    assert parse("--preset", name) == PRESETS[name].config
    assert parse() == PONG


@pytest.mark.parametrize("setting", flatten(PONG))
def test_every_setting_is_an_option_in_each_spelling(setting):
    value = other_value(flatten(PONG)[setting])
    value = value + 100 if setting.endswith("_port") else value  # The next port is another socket's.
    if value is None or setting in ("replay.inserts_wait", "transport.insecure_no_auth"):
        return  # Text, and settings that need another one, have tests below.
    own = setting.partition(".")[0]
    reader = ("--algorithm", own) if own in OWN_SETTINGS else ()
    for option in (setting, setting.replace("_", "-")):
        if isinstance(value, bool):
            branch, _, name = option.rpartition(".")
            assert parsed_value(setting, *reader, f"--{branch}.{'' if value else 'no-'}{name}") is value
            continue
        assert parsed_value(setting, *reader, f"--{option}", str(value)) == value
        assert parsed_value(setting, *reader, f"--{option}={value}") == value


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--env", "ALE/Breakout-v5"], "environment.id", "ALE/Breakout-v5"),
        (["--actors", "1"], "actor.num_actors", 1),
        (["--name", "first"], "run.name", "first"),
        (["--stop-score", "-21"], "run.stop_score", -21.0),
        (["--stop-score=-2.5"], "run.stop_score", -2.5),
        (["--preset", "cartpole", "--stop-score", "none"], "run.stop_score", None),
        (["--environment.image-size", "40"], "environment.image_size", 40),
        (["--environment.image-size", "None"], "environment.image_size", None),
        (["--max-minutes", "5"], "run.max_minutes", 5.0),
        (["--max_minutes=5"], "run.max_minutes", 5.0),
        (["--max-steps", "1_000_000"], "run.max_steps", 1_000_000),
        (["--max-updates", "7"], "run.max_updates", 7),
        (["--device", "cuda"], "learner.device", "cuda"),
        (["--batch-size", "64"], "learner.batch_size", 64),
        (["--network", "mine.nets:make"], "network.factory", "mine.nets:make"),
        (["--network", "a=b:c"], "network.factory", "a=b:c"),
        (["--network=a=b:c"], "network.factory", "a=b:c"),
        (["--seed", "3"], "seed", 3),
        (["--seed", "3", "--seed", "4"], "seed", 4),
        (["--actors", "3", "--actor.num-actors", "4"], "actor.num_actors", 4),
        (["--single-process"], "run.single_process", True),
        (["--environment.clip-rewards"], "environment.clip_rewards", True),
        (["--environment.no-clip-rewards"], "environment.clip_rewards", False),
        (["--environment.no_clip_rewards"], "environment.clip_rewards", False),
        (["--environment.clip-rewards", "--seed", "3"], "environment.clip_rewards", True),
        (["--environment.no-clip-rewards", "--environment.clip-rewards"], "environment.clip_rewards", True),
        (["--network.no-dueling"], "network.dueling", False),
    ],
)
def test_short_names_and_switches_set_their_setting(arguments, setting, value):
    assert parsed_value(setting, *arguments) == value
    assert set(SHORT_NAMES.values()) <= set(flatten(Config()))


def test_options_override_the_file_and_the_file_overrides_the_preset(tmp_path):
    path = write(tmp_path, "[actor]\nn_step = 5\ngamma = 0.5\n")
    config = parse("--preset", "cartpole", "--config", path, "--actor.gamma", "0.7")
    assert config == replace(CARTPOLE, actor=replace(CARTPOLE.actor, n_step=5, gamma=0.7))


def test_relations_are_checked_for_file_and_options_together(tmp_path):
    path = write(tmp_path, "[replay]\nmin_size_to_sample = 100\n")  # Less than the preset's batch.
    arguments = ["--preset", "cartpole", "--config", path]
    with pytest.raises(UsageError, match=rf"learner\.batch_size {CARTPOLE.learner.batch_size}\b"):
        parse(*arguments)
    assert parse(*arguments, "--batch-size", "32").replay.min_size_to_sample == 100


def test_an_environment_selects_the_preset_by_its_observations(tmp_path):
    assert parse("--env", "CartPole-v1") == CARTPOLE
    assert parse("--env", "Acrobot-v1").learner == VECTOR.learner
    path = write(tmp_path, '[environment]\nid = "CartPole-v1"\n')
    assert parse("--config", path) == CARTPOLE
    assert parse("--config", path, "--env", "ALE/Pong-v5") == PONG


@pytest.mark.parametrize("usable", [False, True])
def test_an_image_environment_selects_the_preset_by_the_device(monkeypatch, usable):
    monkeypatch.setattr(gpu, "read_cuda", lambda: Cuda(12_080, 12_060, (Gpu("H200", 2**37, (9, 0)),) * usable))
    by_machine = ATARI if usable else NARROW
    for arguments, preset in (
        ([], by_machine),
        (["--device", "auto"], by_machine),
        (["--device", "cuda"], ATARI),
        (["--device", "cpu"], NARROW),
        (["--single-process"], NARROW),  # always on the CPU
    ):
        assert parse("--env", "ALE/Breakout-v5", *arguments).network == preset.network
    assert parse("--env", "ALE/Pong-v5").network == PONG.network
    with pytest.raises(UsageError, match=r"learner\.device.*'gpu'"):
        parse("--env", "ALE/Breakout-v5", "--device", "gpu")


def test_an_environment_beside_a_preset_changes_only_the_environment():
    config = parse("--preset", "paper", "--env", "CartPole-v1", choose=pytest.fail)
    paper = PRESETS["paper"].config
    assert config == replace(paper, environment=replace(paper.environment, id="CartPole-v1"))


def test_the_preset_is_chosen_with_the_arguments_of_the_environment(monkeypatch):
    created = []
    monkeypatch.setattr(Inspector, "schema", lambda self, config: created.append(config.environment) or VECTORS)
    parse("--env", "Mine-v0", "--env-arg", "size=3")
    assert created == [EnvironmentConfig(id="Mine-v0", args={"size": 3})]


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        (["--env-arg", "continuous=true", "--env-arg", "wind=3.5"], {"continuous": True, "wind": 3.5}),
        (["--env-arg=level=hard", "--env_arg", "seeds=[1, 2]"], {"level": "hard", "seeds": [1, 2]}),
        (["--env-arg", 'task={"random": 1}', "--env-arg", "equation=a=b"], {"task": {"random": 1}, "equation": "a=b"}),
        (["--env-arg", "n=1", "--env-arg", "n=2"], {"n": 2}),
        (["--env-arg", "text=", "--env-arg", "number=NaN-1"], {"text": "", "number": "NaN-1"}),
        (["--environment.args", '{"n": 3}'], {"n": 3}),
        (["--environment.args", '{"n": 3}', "--env-arg", "m=1"], {"n": 3, "m": 1}),
    ],
)
def test_arguments_of_the_environment_are_json_or_text(arguments, args):
    assert parsed_value("environment.args", "--preset", "cartpole", *arguments) == args


def test_env_arg_adds_to_the_arguments_of_the_file_and_args_replaces_them(tmp_path):
    file = write(tmp_path, "[environment]\nargs = {wind = 1, level = 'hard'}\n")
    assert parsed_value("environment.args", "--config", file, "--env-arg", "wind=2") == {"wind": 2, "level": "hard"}
    assert parsed_value("environment.args", "--config", file, "--environment.args", '{"n": 3}') == {"n": 3}
    table = write(tmp_path, "[environment.args]\nwind = 1\n")
    assert parsed_value("environment.args", "--config", table) == {"wind": 1}


def test_arguments_of_the_environment_survive_a_file(tmp_path):
    args = {"a": True, "b": 1, "c": 1.5, "d": 'say "no"', "e": [1, "x"], "f": {"g h": {"i": []}, "j": False}}
    config = replace(Config(), environment=EnvironmentConfig(args=args))
    assert load_toml_text(tmp_path, dump_toml(config, Config())) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_complete_file_needs_no_preset(tmp_path):
    config = parse("--preset", "cartpole", "--stop-score", "none", "--seed", "5")
    assert parse("--config", write(tmp_path, dump_toml(config)), choose=pytest.fail) == config


def test_a_setting_missing_in_a_complete_file_has_its_default(tmp_path):
    """A file of an earlier version lacks later settings; the present presets do not apply to it."""
    text, count = re.subn(r"^fire_after_life_loss = true\n", "", dump_toml(PONG), flags=re.MULTILINE)
    assert count == 1
    pong = replace(PONG, environment=replace(PONG.environment, fire_after_life_loss=False))
    assert parse("--config", write(tmp_path, text), choose=pytest.fail) == pong


def test_a_base_replaces_the_preset():
    base = replace(CARTPOLE, seed=7)
    config = parse("--max-minutes", "5", base=base, choose=pytest.fail)
    assert config == replace(base, run=replace(base.run, max_minutes=5.0))
    with pytest.raises(UsageError, match="--preset"):
        parse("--preset", "pong", base=base)


@pytest.mark.parametrize(
    ("arguments", "names"),  # what the error names: the setting, the value, the limits or the right name
    [
        (["--env", "NoSuchEnv-v0"], ["environment.id", "NoSuchEnv-v0"]),
        (["--actors=-3"], ["actor.num_actors", "65536", "-3"]),
        (["--actors", "lots"], ["actor.num_actors", "'lots'"]),
        (["--actors", "2.5"], ["actor.num_actors", "'2.5'"]),
        (["--max-minutes", "soon"], ["run.max_minutes", "'soon'"]),
        (["--stop-score="], ["run.stop_score", "''"]),
        (["--actor.n-step", "x"], ["actor.n_step", "64", "'x'"]),
        (["--learner.loss", "cubic"], ["learner.loss", "huber", "squared", "'cubic'"]),
        (["--replay.capacity=1"], ["replay.min_size_to_sample 10000", "replay.capacity 1"]),
        (["--single-process=yes"], ["--single-process", "'yes'"]),
        (["--preset", "pogn"], ["--preset", "'pogn'", *PRESETS]),
        (["--preset"], ["--preset", "apex train --help"]),
        (["--env", "--seed", "3"], ["--env", "apex train --help"]),
        (["--seed"], ["--seed", "apex train --help"]),
        (["--config", "no/such.toml"], ["no/such.toml"]),
        (["--replay.capactiy=1"], ["--replay.capactiy", "mean --replay.capacity?"]),
        (["--preste", "pong"], ["--preste", "mean --preset?"]),
        (["--capacity", "5"], ["--capacity", "mean --replay.capacity?"]),
        (["--body_hiden=5"], ["--body-hiden", "mean --network.body-hidden?"]),
        (["--num-threads", "5"], ["--actor.num-threads", "--learner.num-threads", "--evaluator.num-threads?"]),
        (["--repaly.capacity", "5"], ["--repaly.capacity", "mean --replay.capacity?"]),
        (["--environment.no-clip-reward"], ["mean --environment.clip-rewards?"]),
        (["--transport.metrics-port", "5"], ["--transport.metrics-port", "leave it out"]),
        (["--zzz"], ["--zzz", "apex train --help-all"]),
        (["--env-arg", "wind"], ["--env-arg", "'wind'"]),
        (["--env-arg", "=5"], ["--env-arg", "'=5'"]),
        (["--env-arg", "wind=null"], ["environment.args.wind", "None"]),
        (["--env-arg", "wind=[1e999]"], ["environment.args.wind", "inf"]),
        (["--env-arg", "render_mode=human"], ["environment.args", "render_mode", "--video"]),
        (["--environment.args", "3"], ["environment.args", "3"]),
        (["--environment.arg", "3"], ["mean --environment.args"]),
        (["cartpole"], ["'cartpole'", "--preset cartpole"]),
        (["--seed", "3", "4"], ["'4'", "apex train --help"]),
        (["--environment.no-clip-rewards", "false"], ["'false'"]),
        (["-x"], ["'-x'", "apex train --help"]),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(arguments, names):
    with pytest.raises(UsageError) as error:
        parse(*arguments)
    assert [name for name in names if name not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[replay]\ncapactiy = 1\n", ["replay.capactiy", "mean replay.capacity?"]),
        ("replay = 5\n", ["replay", "5"]),
        ("environment = 5\n", ["environment", "5"]),
        ("[environment]\nid = 5\n", ["environment.id", "5"]),
        ("[learner\n", ["run.toml"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_setting_and_value(tmp_path, text, names):
    with pytest.raises(UsageError) as error:
        parse("--config", write(tmp_path, text))
    assert [name for name in names if name not in str(error.value)] == []


def printed(capsys, *arguments, **more):
    with pytest.raises(SystemExit) as end:
        parse(*arguments, **more)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_print_config_prints_a_file_that_repeats_the_run(tmp_path, capsys):
    text = printed(capsys, "--preset", "cartpole", "--seed", "5", "--print-config")
    assert load_toml_text(tmp_path, text) == replace(CARTPOLE, seed=5)


def test_a_changed_setting_is_written_beside_its_default():
    lines = dump_toml(replace(Config(), seed=5, run=replace(Config().run, stop_score=475.0)), Config()).splitlines()
    marked = {line.split(" = ")[0]: line.partition("# default: ")[2] for line in lines if "# default" in line}
    assert marked == {"seed": "1", "stop_score": "none"}


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_presets_and_short_names_on_one_page(option, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    own = Parser(add_help=False)
    own.add_argument("--resume")
    text = printed(capsys, option, own=[own])
    shown = (*SHORT_NAMES, "seed", "algorithm")
    for expected in (*PRESETS, *(f"--{name} " for name in shown), "--resume", "--help-all"):
        assert expected in text, expected
    assert "--replay.capacity" not in text
    assert len(text.splitlines()) < 43
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("columns", [80, 120])
def test_help_all_lists_every_setting_with_its_limits(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed(capsys, "--preset", "cartpole", "--help-all")
    for setting in flatten(Config()):
        assert f"  --{setting.replace('_', '-')}" in text, setting
    rows = dict(re.findall(r"^  --([\w.-]+)[^\n]*\n((?: {8}.*\n)+)", text, re.MULTILINE))
    assert rows["replay.capacity"].split("\n")[-2].split() == f"default: 50000; an integer from 1 to {2**31}".split()
    assert rows["environment.clip-rewards"].split("\n")[-2].strip() == "default: off"
    assert "CartPole-v1" in rows["environment.id"]
    assert max(map(len, text.splitlines())) < columns
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("option", "algorithm"), [("--sac.noise=2", "sac"), ("--r2d2.burn-in=20", "r2d2"), ("--iqn.layer-norm", "iqn")]
)
def test_options_of_an_algorithm_that_is_not_chosen_are_refused(option, algorithm):
    """A custom algorithm may read any of them."""
    command = {"prog": "apex train", "base": Config()}
    name = option.partition("=")[0]
    with pytest.raises(
        UsageError, match=rf"only the algorithm '{algorithm}' reads {name}; add --algorithm {algorithm}"
    ):
        parse_config([option], **command)
    assert parse_config([option, "--algorithm", algorithm], **command).algorithm == algorithm
    assert parse_config([option, "--algorithm", "mine:Mine"], **command).algorithm == "mine:Mine"


def test_every_setting_has_a_comment():
    settings = {name.rpartition(".")[2] for name in flatten(Config())}
    sources = "".join(inspect.getsource(module) for module in (tree, addresses, iqn, r2d2, dpg, sac))
    assert {name for name in settings if not re.search(rf"^    {name}: .*  # \w", sources, re.MULTILINE)} == set()


@pytest.mark.parametrize("option", ["--help", "--help-all", "--print-config"])
def test_a_closed_pipe_is_no_error(option):
    program = (
        "import sys; from apex.command_line import parse_config\n"
        "parse_config([sys.argv[1]], prog='apex train', description='Trains.')"
    )
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # The interpreter flushes once more when it ends.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program, option]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_misspelled_choice_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"--preset must be one of cartpole, .*'cartpol'; did you mean cartpole\?"):
        parse_config(["--preset", "cartpol"], prog="apex train")


def test_a_page_in_a_folder_without_permission_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match="the folder is not writable"):
        check_out(tmp_path / "page.html", ".html")
