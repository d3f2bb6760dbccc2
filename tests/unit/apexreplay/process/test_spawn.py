"""`spawn` starts a program with the given folder, environment and outputs."""

from apexreplay.process.spawn import spawn


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
