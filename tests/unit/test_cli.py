"""The `apex` command: which program a word starts, and how it ends."""

import importlib.util
import re
import subprocess
import sys

import pytest

from apex.cli import COMMANDS, load, main
from apex.errors import UsageError
from apex.version import VERSION

pytestmark = pytest.mark.programs


class Tape:
    """Stands for every program: notes what it was started with, and ends as told."""

    def __init__(self, ending=0):
        self.ending = ending
        self.words = []

    def __call__(self, module):
        def program(argv):
            self.words += [module, *argv]
            if isinstance(self.ending, BaseException):
                raise self.ending
            return self.ending

        return program


def run(*words):
    """The real command, in a process of its own."""
    return subprocess.run([sys.executable, "-m", "apex", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_word_starts_its_program_with_the_words_after_it(name):
    tape = Tape(ending=75)
    assert main([name, "--seed", "3"], load=tape) == 75
    assert tape.words == [COMMANDS[name].module, "--seed", "3"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_word_has_a_program(name):
    assert importlib.util.find_spec(COMMANDS[name].module) is not None


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_command_it_says_what_there_is(words, capsys):
    assert main(words, load=Tape()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "usage: apex COMMAND [OPTIONS]" in lines
    for name, command in COMMANDS.items():
        assert any(re.match(rf"  {name} +{re.escape(command.summary)}$", line) for line in lines), name
    assert max(map(len, lines)) <= 80


def test_it_tells_its_version(capsys):
    assert main(["--version"], load=Tape()) == 0
    assert capsys.readouterr().out == f"apex {VERSION}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trian", "apex: unknown command 'trian'; did you mean train? known: train, evaluate, watch,"),
        ("fly", "apex: unknown command 'fly'; known: train,"),
        (
            "--preset",
            "apex: the command is missing before --preset; write, for example, `apex train --preset`; known: train,",
        ),
    ],
)
def test_an_unknown_word_is_refused_with_what_is_known(word, message, capsys):
    tape = Tape()
    assert main([word], load=tape) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert tape.words == []


def test_a_users_mistake_is_one_sentence_and_status_2(capsys):
    assert main(["train"], load=Tape(UsageError("--actors must be >= 1, got 0"))) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "apex: --actors must be >= 1, got 0\n")


def test_ctrl_c_ends_it_without_a_traceback(capsys):
    assert main(["train"], load=Tape(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        main(["train"], load=Tape(ZeroDivisionError()))


def test_the_module_is_the_command():
    done = run("trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("apex: unknown command 'trian'")


def test_a_program_is_the_main_of_its_module():
    assert load("apex.cli") is main


def test_words_come_from_the_command_line_and_programs_from_their_modules():
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"apex {VERSION}\n", "")


def test_what_is_heavy_is_not_imported_before_it_is_asked_for():
    heavy = ("torch", "gymnasium", "zmq")
    program = f"import sys, apex.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
