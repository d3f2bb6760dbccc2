"""The `apex` command: the program of each subcommand, and its exit status."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from apex.cli import COMMANDS, load, main
from apex.version import VERSION
from apexreplay.errors import UsageError

pytestmark = pytest.mark.programs


class Program:
    """Replaces every program: records its module and arguments, and ends with `ending`."""

    def __init__(self, ending=0):
        self.ending = ending
        self.started = []

    def __call__(self, module):
        def main(argv):
            self.started += [module, *argv]
            if isinstance(self.ending, BaseException):
                raise self.ending
            return self.ending

        return main


def run(*arguments):
    """Runs the real command in a child process."""
    return subprocess.run([sys.executable, "-m", "apex", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_starts_its_program_with_the_arguments(name):
    program = Program(ending=75)
    assert main([name, "--seed", "3"], load=program) == 75
    assert program.started == [COMMANDS[name].module, "--seed", "3"]
    assert importlib.util.find_spec(COMMANDS[name].module) is not None


@pytest.mark.parametrize(  # `platform` is replaced: these tests do not run on such hosts.
    ("system", "machine", "refused"),
    [
        ("Linux", "x86_64", set()),
        ("Linux", "aarch64", {"train", "sweep", "doctor", "replay"}),
        ("Darwin", "arm64", {"train", "sweep", "doctor", "replay", "learner", "actor", "evaluator"}),
        ("Darwin", "x86_64", {"train", "sweep", "doctor", "replay", "learner", "actor", "evaluator"}),
    ],
)
def test_another_platform_is_named_with_what_works_there(system, machine, refused, monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert {name for name in COMMANDS if main([name], load=Program()) == 2} == refused
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(refused)
    assert all(f"{system} on {machine}" in line and "evaluate, watch, plot" in line for line in errors)
    assert all(("actor and evaluator" in line) == (system == "Linux") for line in errors)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_command_all_commands_are_listed(arguments, capsys):
    assert main(arguments, load=Program()) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert any(re.match(rf"  {name} +{re.escape(command.summary)}$", line) for line in lines), name
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("trian", ["'trian'", "train?"]),
        ("fly", ["'fly'", *COMMANDS]),
        ("--preset", ["`apex train --preset`", *COMMANDS]),
    ],
)
def test_an_unknown_command_is_refused_with_the_known_ones(name, texts, capsys):
    program = Program()
    assert main([name], load=program) == 2
    output = capsys.readouterr()
    assert [text for text in texts if text not in output.err] == []
    assert (output.err.count("\n"), output.out, program.started) == (1, "", [])


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [(UsageError("--actors 0", "use 1"), 2, "apex plot: --actors 0; use 1\n"), (KeyboardInterrupt(), 130, "")],
)
def test_an_error_of_the_user_has_no_traceback(ending, status, error, capsys):
    assert main(["plot"], load=Program(ending)) == status
    assert capsys.readouterr() == ("", error)


def test_an_unexpected_exception_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        main(["train"], load=Program(ZeroDivisionError()))


def test_the_module_runs_the_command():
    done = run("trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("apex: ")
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"apex {VERSION}\n", "")
    assert load("apex.cli") is main


def test_a_path_that_is_not_valid_utf_8_is_printed_as_it_is():
    words = [sys.executable, "-m", "apex", "train", "--preset", "cartpole", "--run.folder", b"a\xff", "--print-config"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(words, capture_output=True, env=environment, timeout=60)
    assert b'folder = "a\xff"' in done.stdout, done.stderr


def test_heavy_libraries_are_not_imported():
    heavy = ("torch", "gymnasium", "zmq")
    program = f"import sys, apex.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
