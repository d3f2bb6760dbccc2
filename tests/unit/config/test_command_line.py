"""The command line of a run: what each way of writing means, which source wins, and what is refused in which words."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from apex.config import Config, dump_toml, flatten, load_toml
from apex.config.command_line import LATER_SETTINGS, SHORT_NAMES, describe_config, parse_config
from apex.config.presets import ATARI, CARTPOLE, NARROW, PONG, PRESETS, VECTOR
from apex.errors import ConfigError
from apex.runtime import gpu
from apex.runtime.gpu import Cuda, Gpu, means_gpu


def kind(config):
    """What the environments of these tests show."""
    return "vector" if config.id in ("CartPole-v1", "Acrobot-v1") else "atari"


def parse(*words, kind=kind, means_gpu=means_gpu):
    return parse_config(words, prog="apex train", description="Trains.", kind=kind, means_gpu=means_gpu)


def parsed_value(setting, *words):
    return flatten(parse(*words))[setting]


def refusal(*words):
    with pytest.raises(ConfigError) as error:
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
    if value is None or setting in ("replay.inserts_wait", "transport.insecure_no_auth"):
        return  # Words, and settings that need another one: below.
    for option in (setting, setting.replace("_", "-")):
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
    assert set(SHORT_NAMES.values()) <= set(flatten(Config()))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--environment.clip-rewards"], True),
        (["--environment.no-clip-rewards"], False),
        (["--environment.no_clip_rewards"], False),
        (["--environment.clip-rewards", "false"], False),
        (["--environment.clip-rewards=True"], True),
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


def test_a_refusal_of_the_environment_is_passed_on():
    def refuse(config):
        raise ConfigError(f"there is no environment {config.id}")

    with pytest.raises(ConfigError, match="there is no environment NoSuchEnv-v0"):
        parse("--env", "NoSuchEnv-v0", kind=refuse)


def test_a_whole_file_is_repeated_exactly(tmp_path):
    config = parse("--preset", "cartpole", "--stop-score", "none", "--seed", "5")
    text = dump_toml(config)
    assert parse("--config", write(tmp_path, text), kind=None) == config
    for setting in LATER_SETTINGS:  # A run of before there were these is repeated too, and has them off.
        text, count = re.subn(rf"^{setting.rpartition('.')[2]} = .*\n", "", text, flags=re.MULTILINE)
        assert count == 1
    assert parse("--config", write(tmp_path, text), kind=None) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actors", "0"], "--actors must be >= 1, got 0"),
        (["--actors=-3"], "--actors must be >= 1, got -3"),
        (["--actors", "lots"], "actor.num_actors must be int, got 'lots'"),
        (["--actors", "2.5"], "actor.num_actors must be int, got '2.5'"),
        (["--max-minutes", "soon"], "run.max_minutes must be float, got 'soon'"),
        (["--max-minutes", "nan"], "run.max_minutes must be a finite number, got nan"),
        (["--stop-score", "high"], "run.stop_score must be float, got 'high'"),
        (["--stop-score="], "run.stop_score must be float, got ''"),
        (["--device", "tpu"], "learner.device must be one of auto, cpu, cuda, got 'tpu'"),
        (["--env", ""], "environment.id must name an environment, got ''"),
        (["--replay.capacity=1"], "need 0 < min_size_to_sample <= capacity, got 10000 and 1"),
        (["--environment.clip-rewards", "maybe"], "environment.clip_rewards must be bool, got 'maybe'"),
        (["--environment.no-clip-rewards=false"], "--environment.no-clip-rewards takes no value, got 'false'"),
        (["--print-config=yes"], "--print-config takes no value, got 'yes'"),
        (["--preset", "pogn"], "--preset must be one of cartpole, lunarlander, pong, atari, paper, got 'pogn'"),
        (["--preset"], "--preset needs a value"),
        (["--env", "--seed", "3"], "--env needs a value"),
        (["--config", "no/such.toml"], "cannot read the configuration no/such.toml"),
        (["--replay.capactiy=1"], "unknown option --replay.capactiy; did you mean --replay.capacity?"),
        (["--preste", "pong"], "unknown option --preste; did you mean --preset?"),
        (["--capacity", "5"], "unknown option --capacity; did you mean --replay.capacity?"),
        (["--body_hiden=5"], "unknown option --body_hiden; did you mean --network.body-hidden?"),
        (
            ["--num-threads", "5"],
            "did you mean --actor.num-threads or --learner.num-threads or --evaluator.num-threads?",
        ),
        (
            ["--checkpoint.zzz", "5"],
            "unknown option --checkpoint.zzz; there are --checkpoint.period, --checkpoint.keep",
        ),
        (["--repaly.capacity", "5"], "unknown option --repaly.capacity; did you mean --replay.capacity?"),
        (["--environment.no-clip-reward"], "did you mean --environment.no-clip-rewards?"),
        (["--zzz"], "unknown option --zzz; --help lists them all"),
        (["cartpole"], "unexpected 'cartpole'; did you mean --preset cartpole?"),
        (["--seed", "3", "4"], "unexpected '4': options begin with --, and --help lists them"),
        (["-x"], "unexpected '-x': options begin with --, and --help lists them"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_name_and_value(words, message):
    assert message in refusal(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[replay]\ncapactiy = 1\n", "unknown setting replay.capactiy"),
        ("replay = 5\n", "replay must be a table of settings, got 5"),
        ("environment = 5\n", "environment must be a table of settings, got 5"),
        ("[environment]\nid = 5\n", "environment.id must be str, got 5"),
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
    lines = describe_config(replace(Config(), seed=5, run=replace(Config().run, stop_score=475.0))).splitlines()
    marked = {line.split(" = ")[0]: line.partition("# default: ")[2] for line in lines if "# default" in line}
    assert marked == {"seed": "1", "stop_score": "none"}
    assert lines[0].startswith("# 2 of ")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--env", "--help"], ["--preset", "nonsense", "--help"]])
def test_help_shows_presets_short_names_and_every_setting_with_its_sentence(words, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*words)
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "usage: apex train" in text
    for expected in (*PRESETS, *SHORT_NAMES, *(setting.replace("_", "-") for setting in flatten(Config()))):
        assert expected in text, expected
    assert "the oldest segments go first" in text  # the comment beside replay.capacity
    assert "\x1b" not in text  # No terminal: no colours.


def test_help_shows_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        parse("--preset", "cartpole", "--help")
    assert "(default: CartPole-v1)" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--help", "--print-config"])
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
