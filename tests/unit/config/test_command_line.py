"""The command line of a run: what each way of writing means, which source wins, and what is refused in which words."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from apex.config import (
    Config,
    EnvironmentConfig,
    addresses,
    dpg,
    dump_toml,
    flatten,
    from_dict,
    load_toml,
    to_dict,
    tree,
)
from apex.config.arguments import Parser
from apex.config.command_line import SHORT_NAMES, parse_config
from apex.config.presets import ATARI, CARTPOLE, NARROW, PONG, PRESETS, VECTOR
from apex.errors import UsageError
from apex.runtime import gpu
from apex.runtime.gpu import Cuda, Gpu, means_gpu


def kind(config):
    """What the environments of these tests show."""
    return "vector" if config.id in ("CartPole-v1", "Acrobot-v1") else "atari"


def parse(*words, kind=kind, means_gpu=means_gpu, **more):
    return parse_config(words, prog="apex train", description="Trains.", kind=kind, means_gpu=means_gpu, **more)


def parsed_value(setting, *words):
    return flatten(parse(*words))[setting]


def refusal(*words):
    with pytest.raises(UsageError) as error:
        parse(*words)
    return str(error.value)


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def other_value(value):
    """Some other value of the same type that is in range for every setting of the tree; None if there is none such."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 0.99 if isinstance(value, float) else None


def test_nothing_typed_is_pong():
    assert parse() == PONG


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_taken_as_it_is(name):
    assert parse("--preset", name) == PRESETS[name].config


@pytest.mark.parametrize("setting", flatten(PONG))
def test_every_setting_is_an_option_in_each_spelling(setting):
    value = other_value(flatten(PONG)[setting])
    value = value + 100 if setting.endswith("_port") else value  # The next port is another socket's.
    if value is None or setting in ("replay.inserts_wait", "transport.insecure_no_auth"):
        return  # Words, and settings that need another one: below.
    for option in (setting, setting.replace("_", "-")):
        if isinstance(value, bool):
            branch, _, name = option.rpartition(".")
            assert parsed_value(setting, f"--{branch}.{'' if value else 'no-'}{name}") is value
            continue
        assert parsed_value(setting, f"--{option}", str(value)) == value
        assert parsed_value(setting, f"--{option}={value}") == value


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["--env", "ALE/Breakout-v5"], "environment.id", "ALE/Breakout-v5"),
        (["--actors", "1"], "actor.num_actors", 1),
        (["--name", "first"], "run.name", "first"),
        (["--stop-score", "-21"], "run.stop_score", -21.0),
        (["--stop-score=-2.5"], "run.stop_score", -2.5),
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
    ],
)
def test_short_names_stand_for_settings(words, setting, value):
    assert parsed_value(setting, *words) == value


def test_every_short_name_stands_for_a_setting_that_there_is():
    assert {short.setting for short in SHORT_NAMES.values()} <= set(flatten(Config()))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--environment.clip-rewards"], True),
        (["--environment.no-clip-rewards"], False),
        (["--environment.no_clip_rewards"], False),
        (["--environment.clip-rewards", "--seed", "3"], True),
        (["--environment.no-clip-rewards", "--environment.clip-rewards"], True),
    ],
)
def test_a_switch_is_turned_either_way(words, value):
    assert parsed_value("environment.clip_rewards", *words) is value


def test_none_takes_a_presets_value_away():
    assert parse("--preset", "cartpole", "--stop-score", "none").run.stop_score is None


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = write(tmp_path, "[actor]\nn_step = 5\ngamma = 0.5\n")
    config = parse("--preset", "cartpole", "--config", path, "--actor.gamma", "0.7")
    assert config == replace(CARTPOLE, actor=replace(CARTPOLE.actor, n_step=5, gamma=0.7))


def test_file_and_command_line_are_judged_together(tmp_path):
    path = write(tmp_path, "[replay]\nmin_size_to_sample = 100\n")  # Less than the preset's batch.
    words = ["--preset", "cartpole", "--config", path]
    assert f"learner.batch_size {CARTPOLE.learner.batch_size} must be <=" in refusal(*words)
    assert parse(*words, "--batch-size", "32").replay.min_size_to_sample == 100


def test_an_environment_alone_picks_the_preset_by_what_it_shows():
    assert parse("--env", "CartPole-v1") == CARTPOLE
    assert parse("--env", "Acrobot-v1").learner == VECTOR.learner


@pytest.mark.parametrize("usable", [False, True])
def test_pixels_alone_pick_the_preset_by_what_the_learner_computes_on(monkeypatch, usable):
    monkeypatch.setattr(gpu, "read_cuda", lambda: Cuda(12_080, 12_060, (Gpu("H200", 2**37, (9, 0)),) * usable))
    by_machine = ATARI if usable else NARROW
    assert parse("--env", "ALE/Breakout-v5").network == by_machine.network
    assert parse("--env", "ALE/Breakout-v5", "--device", "auto").network == by_machine.network
    assert parse("--env", "ALE/Breakout-v5", "--device", "cuda").network == ATARI.network
    assert parse("--env", "ALE/Breakout-v5", "--device", "cpu").network == NARROW.network
    assert parse("--env", "ALE/Breakout-v5", "--single-process").network == NARROW.network  # It is always on a CPU.
    assert parse("--env", "ALE/Pong-v5").network == PONG.network
    assert "device" in refusal("--env", "ALE/Breakout-v5", "--device", "gpu")


def test_an_environment_in_a_file_picks_the_preset_too(tmp_path):
    path = write(tmp_path, '[environment]\nid = "CartPole-v1"\n')
    assert parse("--config", path) == CARTPOLE
    assert parse("--config", path, "--env", "ALE/Pong-v5") == PONG


def test_an_environment_beside_a_preset_changes_the_environment_only():
    config = parse(
        "--preset", "paper", "--env", "CartPole-v1", kind=None, means_gpu=None
    )  # Nobody is asked what it shows.
    paper = PRESETS["paper"].config
    assert config == replace(paper, environment=replace(paper.environment, id="CartPole-v1"))


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (["--env-arg", "continuous=true", "--env-arg", "wind=3.5"], {"continuous": True, "wind": 3.5}),
        (["--env-arg=level=hard", "--env_arg", "seeds=[1, 2]"], {"level": "hard", "seeds": [1, 2]}),
        (["--env-arg", 'task={"random": 1}', "--env-arg", "equation=a=b"], {"task": {"random": 1}, "equation": "a=b"}),
        (["--env-arg", "n=1", "--env-arg", "n=2"], {"n": 2}),
        (["--env-arg", "text=", "--env-arg", "number=NaN-1"], {"text": "", "number": "NaN-1"}),
        (["--environment.args", '{"n": 3}'], {"n": 3}),
    ],
)
def test_arguments_of_the_environment_are_json_or_text(words, args):
    assert parsed_value("environment.args", "--preset", "cartpole", *words) == args


def test_arguments_of_the_environment_are_laid_over_those_of_the_file(tmp_path):
    file = write(tmp_path, "[environment]\nargs = {wind = 1, level = 'hard'}\n")
    assert parsed_value("environment.args", "--config", file, "--env-arg", "wind=2") == {"wind": 2, "level": "hard"}
    table = write(tmp_path, "[environment.args]\nwind = 1\n")
    assert parsed_value("environment.args", "--config", table) == {"wind": 1}


def test_the_kind_of_an_environment_is_asked_with_its_arguments():
    asked = []
    parse("--env", "Mine-v0", "--env-arg", "size=3", kind=lambda config: asked.append(config) or "vector")
    assert asked == [EnvironmentConfig(id="Mine-v0", args={"size": 3})]


def test_arguments_of_the_environment_survive_a_file(tmp_path):
    args = {"a": True, "b": 1, "c": 1.5, "d": 'say "no"', "e": [1, "x"], "f": {"g h": {"i": []}, "j": False}}
    config = replace(Config(), environment=EnvironmentConfig(args=args))
    assert load_toml_text(tmp_path, dump_toml(config, Config())) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_refusal_of_the_environment_is_passed_on():
    def refuse(config):
        raise UsageError(f"there is no environment {config.id}")

    with pytest.raises(UsageError, match="there is no environment NoSuchEnv-v0"):
        parse("--env", "NoSuchEnv-v0", kind=refuse)


def test_a_whole_file_is_repeated_exactly(tmp_path):
    config = parse("--preset", "cartpole", "--stop-score", "none", "--seed", "5")
    assert parse("--config", write(tmp_path, dump_toml(config)), kind=None) == config


def test_a_setting_that_a_whole_file_leaves_out_has_its_default(tmp_path):
    """A run of an earlier version lacks later settings, whatever a preset says of them now."""
    text, count = re.subn(r"^fire_after_life_loss = true\n", "", dump_toml(PONG), flags=re.MULTILINE)
    assert count == 1
    pong = replace(PONG, environment=replace(PONG.environment, fire_after_life_loss=False))
    assert parse("--config", write(tmp_path, text), kind=None) == pong


def test_options_change_the_configuration_that_a_program_gives_as_base():
    base = replace(CARTPOLE, seed=7)
    config = parse("--max-minutes", "5", base=base, kind=None)
    assert config == replace(base, run=replace(base.run, max_minutes=5.0))
    with pytest.raises(UsageError, match="a resumed run keeps its own configuration: leave --preset out"):
        parse("--preset", "pong", base=base)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actors=-3"], "actor.num_actors must be an integer from 0 to 65536, got -3"),
        (["--actors", "lots"], "actor.num_actors must be an integer from 0 to 65536, got 'lots'"),
        (["--actors", "2.5"], "actor.num_actors must be an integer from 0 to 65536, got '2.5'"),
        (["--max-minutes", "soon"], "run.max_minutes must be a number of at least 0, got 'soon'"),
        (["--stop-score="], "run.stop_score must be a number or none, got ''"),
        (["--actor.n-step", "x"], "actor.n_step must be an integer from 1 to 64, got 'x'"),
        (["--learner.loss", "cubic"], "learner.loss must be one of huber, squared, got 'cubic'"),
        (["--replay.capacity=1"], "replay.min_size_to_sample 10000 must be <= replay.capacity 1"),
        (["--single-process=yes"], "--single-process: ignored explicit argument 'yes'"),
        (["--preset", "pogn"], "argument --preset: invalid choice: 'pogn' (choose from"),
        (["--preset"], "argument --preset: expected one argument; run apex train --help for a list of options"),
        (["--env", "--seed", "3"], "argument --env: expected one argument"),
        (["--seed"], "Missing value for argument '--seed'."),
        (["--config", "no/such.toml"], "cannot read the configuration no/such.toml"),
        (["--replay.capactiy=1"], "unknown option --replay.capactiy; did you mean --replay.capacity?"),
        (["--preste", "pong"], "unknown option --preste; did you mean --preset?"),
        (["--capacity", "5"], "unknown option --capacity; did you mean --replay.capacity?"),
        (["--body_hiden=5"], "unknown option --body-hiden; did you mean --network.body-hidden?"),
        (
            ["--num-threads", "5"],
            "did you mean --actor.num-threads or --learner.num-threads or --evaluator.num-threads?",
        ),
        (["--repaly.capacity", "5"], "unknown option --repaly.capacity; did you mean --replay.capacity?"),
        (["--environment.no-clip-reward"], "did you mean --environment.clip-rewards?"),
        (["--zzz"], "unknown option --zzz; run apex train --help-all for a list"),
        (["--env-arg", "wind"], "--env-arg must be KEY=VALUE, got 'wind'"),
        (["--env-arg", "=5"], "--env-arg must be KEY=VALUE, got '=5'"),
        (["--env-arg", "wind=null"], "environment.args.wind must be text, a finite number, true or false, a list or"),
        (
            ["--env-arg", "wind=[1e999]"],
            "environment.args.wind must be text, a finite number, true or false, a list or",
        ),
        (["--env-arg", "render_mode=human"], "environment.args must not have render_mode, because --video sets it"),
        (["--environment.args", "3"], "environment.args must be a table of names and values, got 3"),
        (["--environment.arg", "3"], "did you mean --environment.args"),
        (["cartpole"], "unexpected argument 'cartpole'; did you mean --preset cartpole?"),
        (["--seed", "3", "4"], "unexpected argument '4': options begin with --; run apex train --help for a list"),
        (["--environment.no-clip-rewards", "false"], "unexpected argument 'false': options begin with --"),
        (["-x"], "unexpected argument '-x': options begin with --"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_name_and_value(words, message):
    assert message in refusal(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[replay]\ncapactiy = 1\n", "unknown setting replay.capactiy; did you mean replay.capacity?"),
        ("replay = 5\n", "replay must be a table of settings, got 5"),
        ("environment = 5\n", "environment must be a table of settings, got 5"),
        ("[environment]\nid = 5\n", "environment.id must be text that is not empty, got 5"),
        ("[learner\n", "cannot read the configuration"),
    ],
)
def test_a_file_is_refused_in_the_same_words(tmp_path, text, message):
    assert message in refusal("--config", write(tmp_path, text))


def test_print_config_prints_what_would_run_and_ends(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--preset", "cartpole", "--seed", "5", "--print-config")
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert load_toml_text(tmp_path, printed) == replace(CARTPOLE, seed=5)


def load_toml_text(tmp_path, text):
    return load_toml(tmp_path / write(tmp_path, text))


def test_what_differs_from_the_default_has_the_default_beside_it():
    lines = dump_toml(replace(Config(), seed=5, run=replace(Config().run, stop_score=475.0)), Config()).splitlines()
    marked = {line.split(" = ")[0]: line.partition("# default: ")[2] for line in lines if "# default" in line}
    assert marked == {"seed": "1", "stop_score": "none"}


def printed(capsys, *words, **more):
    with pytest.raises(SystemExit) as end:
        parse(*words, **more)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_shows_presets_and_what_people_use_first_on_one_page(word, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    own = Parser(add_help=False)
    own.add_argument("--resume")
    text = printed(capsys, word, own=[own])
    for expected in (*PRESETS, *(f"--{short} " for short in SHORT_NAMES), "--resume", "--help-all"):
        assert expected in text, expected
    assert "--replay.capacity" not in text
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 100


def test_help_all_shows_every_setting_with_its_sentence(capsys):
    text = printed(capsys, "--help-all")
    for setting in flatten(Config()):
        assert f"--{setting.replace('_', '-')}" in text, setting
    assert "new ones replace the oldest" in text  # the comment beside replay.capacity
    assert "\x1b" not in text  # No terminal: no colours.


def test_help_all_shows_the_values_of_the_preset(capsys):
    assert "CartPole-v1" in printed(capsys, "--preset", "cartpole", "--help-all")


def test_every_setting_has_a_sentence():
    settings = {name.rpartition(".")[2] for name in flatten(Config())}
    sources = "".join(inspect.getsource(module) for module in (tree, addresses, dpg))
    assert {name for name in settings if not re.search(rf"^    {name}: .*  # \w", sources, re.MULTILINE)} == set()


@pytest.mark.parametrize("option", ["--help", "--help-all", "--print-config"])
def test_a_reader_that_leaves_early_is_no_error(option):
    program = (
        "import sys; from apex.config.command_line import parse_config\n"
        "parse_config([sys.argv[1]], prog='apex train', description='Trains.', kind=None, means_gpu=None)"
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
