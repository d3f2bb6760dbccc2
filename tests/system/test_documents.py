"""Runs the commands of the README and the guide unchanged, except for limits that shorten them.

A block that cannot be run here has a comment above it: `<!-- not run: REASON -->`.
"""

import re
import shlex
import subprocess
import sys
from inspect import isfunction
from pathlib import Path

import pytest
from support.programs import TINY

import apex
import apexreplay

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "docs/index.md",
    *sorted(ROOT.glob("docs/guide/*.md")),
    *sorted(ROOT.glob("docs/tutorials/*.md")),
    ROOT / "docs/concepts/tables.md",
    ROOT / "apexreplay/README.md",
]
DOCUMENTS.remove(ROOT / "docs/tutorials/replay-server.md")  # test_library_page.py runs this page as a whole.
REFERENCES = {apex: ROOT / "docs/reference/api.md", apexreplay: ROOT / "docs/reference/library.md"}
PAGES = sorted(
    {
        *DOCUMENTS,
        ROOT / "docs/tutorials/replay-server.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/concepts").glob("*.md"),
    }
)
BLOCK = re.compile(r"(?P<reason><!-- not run: .+? -->\n)?```(?P<language>bash|python)\n(?P<text>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]*))?\)")
LIMITS = {  # appended to a command: the last of several equal options counts
    "train": ["--print-config"],
    "evaluate": ["--episodes", "1"],
    "watch": ["--seconds", "0.2"],
    "report": ["--no-video"],
    "export": ["--episodes", "1"],
}
NO_LIMIT = {"doctor", "plot", "keys", "logs"}
INSTALLATION = {"git", "export", "source"}  # commands that are not run


def blocks(path, language):
    return [found for found in BLOCK.finditer(path.read_text()) if found["language"] == language]


def runnable():
    """The blocks of shell commands. A command may need the previous command of its block."""
    for path in DOCUMENTS:
        for number, block in enumerate(blocks(path, "bash")):
            if not block["reason"]:
                yield pytest.param(block["text"], id=f"{path.stem}-{number}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the examples and a short run that every command may use."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "examples").symlink_to(ROOT / "examples")
    train = ["train", *TINY, "--name", "NAME", "--max-updates", "30", "--run.no-tensorboard"]
    subprocess.run([sys.executable, "-m", "apex", *train], cwd=folder, check=True, timeout=300)
    for other in ("RUN", "my-run"):
        (folder / "runs" / other).symlink_to("NAME")
    return folder


def shorten(command_line):
    """The arguments of the command for `python -m apex`, with a limit."""
    program, *arguments = (part for part in command_line if part != "OTHER")  # a second run
    if program == "./run.sh":
        arguments = ["train", *arguments]
    elif program not in ("apex", ".venv/bin/apex", "../.venv/bin/apex"):
        raise AssertionError(f"no rule for {program}: add one, or mark the block `<!-- not run: REASON -->`")
    assert arguments[0] in LIMITS or arguments[0] in NO_LIMIT, arguments
    wants_no_limit = {"--help", "--help-all", "--print-config"} & set(arguments)
    return arguments + ([] if wants_no_limit else LIMITS.get(arguments[0], []))


@pytest.mark.parametrize("text", list(runnable()))
def test_the_commands_of_a_block_work(text, folder, commands):
    where = folder
    for command_line in filter(
        None, (shlex.split(line, comments=True) for line in text.replace("\\\n", "").splitlines())
    ):
        if command_line[0] in INSTALLATION:
            continue
        if command_line[0] == "cd":
            where = where / command_line[1]
            continue
        answer = commands.run(where, shorten(command_line))
        assert answer.returncode == 0, f"{command_line}: {answer.stdout}{answer.stderr}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_the_python_of_a_document_runs(path, tmp_path, commands):
    for block in blocks(path, "python"):
        if block["reason"]:
            continue
        text = block["text"].replace('run={"max_minutes": 5}', 'run={"max_updates": 3, "tensorboard": False}')
        text = text.replace("episodes=100", "episodes=1")
        answer = commands.run(tmp_path, text)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("text", [each["text"] for path in REFERENCES.values() for each in blocks(path, "python")])
def test_the_python_of_the_reference_runs_and_prints_what_it_says(text, folder, commands):
    said = [line.partition("print(")[2].partition(")  # ")[2] for line in text.splitlines()]
    script = text.replace('{"max_minutes": 5}', '{"max_updates": 3, "tensorboard": False}').replace("=100", "=1")
    script = script.replace('{"max_minutes": 10}', '{"max_updates": 6}')
    answer = commands.run(folder, script)
    assert answer.returncode == 0, answer.stderr
    assert all(each in answer.stdout for each in said), answer.stdout


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in REFERENCES for name in package.__all__])
def test_the_reference_has_every_public_name_and_a_call_of_each_function(package, name):
    text, name_in_full = REFERENCES[package].read_text(), f"{package.__name__}.{name}"
    assert re.search(rf"^\.\. (py:class|auto\w+):: {name_in_full}$", text, re.MULTILINE)
    if isfunction(getattr(package, name)):
        assert any(f"{name_in_full}(" in block["text"] for block in blocks(REFERENCES[package], "python"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path):
    for target, anchor in LINK.findall(path.read_text()):
        there = path.parent / target
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], anchor


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
