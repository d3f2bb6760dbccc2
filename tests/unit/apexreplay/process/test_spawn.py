"""`spawn` starts a program with the given folder, environment and outputs."""

import pytest

from apexreplay.process.spawn import lower_priority, spawn


def test_a_program_has_the_folder_and_the_variables_it_was_given(tmp_path):
    with (tmp_path / "output").open("wb") as output:
        process = spawn(
            ["sh", "-c", "pwd; echo $FRUIT; echo wrong >&2"],
            output=output,
            environment={"FRUIT": "plum"},
            cwd=tmp_path.parent,
        )
    assert process.wait(10) == 0
    assert (tmp_path / "output").read_text() == f"{tmp_path.parent}\nplum\nwrong\n"


@pytest.mark.parametrize(("leader", "written"), [(100, ["7"]), (99, ["7"]), (1, [])])
def test_only_an_own_session_gets_a_lower_priority(monkeypatch, leader, written):
    """100 is this process, 99 its parent; else, the session is that of a shell."""
    values, nice = [], []
    for name, value in (("getpid", 100), ("getppid", 99)):
        monkeypatch.setattr(f"os.{name}", lambda value=value: value)
    monkeypatch.setattr("os.getsid", lambda pid: leader)
    monkeypatch.setattr("os.nice", nice.append)
    monkeypatch.setattr("pathlib.Path.write_text", lambda path, text: values.append(text))
    lower_priority(7)
    assert (nice, values) == ([7], written)
