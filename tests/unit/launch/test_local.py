"""Whole runs on this machine, whose programs `sh -c` replaces."""

import dataclasses
import socket

import pytest
from support.launches import cartpole, stand_in

from apex.config import LearnerConfig, TransportConfig, load_toml
from apex.errors import FINISHED, REFUSED, UsageError
from apex.facts import Ending, EndReason, ProgramEvent
from apex.launch.start import Start
from apex.launch.train import execute, main, show
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop
from apex.sentences import describe_event, describe_failure

pytestmark = pytest.mark.programs


def run(config, *programs, stop=None, **options):
    """Runs these programs instead of the usual ones."""
    return execute(
        Start(config=config, argv=["x"], edit_programs=lambda usual: list(programs), **options), stop or Stop()
    )


FINISHES = stand_in("learner", "exit 0", ends_run=True)


def test_a_run_goes_from_its_folder_to_its_summary(tmp_path, capsys):
    config = cartpole(tmp_path)
    config = dataclasses.replace(config, learner=LearnerConfig(batch_size=0, bfloat16="auto", device="cpu"))
    outcome = run(config, stand_in("actor", "exec sleep 600"), FINISHES)
    assert outcome.ending == Ending(FINISHED, "learner")
    folder = RunFolder.open(tmp_path / "mine")
    assert load_toml(folder.config_file) == folder.config == outcome.config
    assert outcome.config.learner.batch_size >= 64  # chosen for this machine
    assert outcome.config.learner.bfloat16 in ("on", "off")
    assert show(outcome) == FINISHED
    output = capsys.readouterr().out
    assert "CartPole-v1, seed 1" in output
    assert output.count(f"run folder: {tmp_path / 'mine'}") == 2  # at the start and at the end
    event = describe_event(ProgramEvent("actor", "stopping"))
    assert event in output
    assert event in (folder.logs / "launcher.log").read_text()


def test_a_running_run_is_not_resumed_and_a_finished_one_is(tmp_path):
    refused = []

    def resume(usual):
        with pytest.raises(UsageError, match=r"mine.*running") as error:
            execute(Start(config=config, argv=[], folder=tmp_path / "mine"), Stop())
        refused.append(error)
        return [FINISHES]

    config = cartpole(tmp_path)
    outcome = execute(Start(config=config, argv=[], edit_programs=resume), Stop())
    assert len(refused) == 1
    assert "resumed" not in RunFolder.open(tmp_path / "mine").manifest
    again = run(outcome.config, FINISHES, folder=tmp_path / "mine")
    assert again.ending.status == FINISHED
    assert [start["argv"] for start in RunFolder.open(tmp_path / "mine").manifest["resumed"]] == [["x"]]


def test_a_run_ends_with_the_status_of_the_program_that_refused(tmp_path, capsys):
    outcome = run(cartpole(tmp_path), stand_in("learner", "echo starting; echo 'no GPU here'; exit 2", ends_run=True))
    assert show(outcome) == REFUSED
    assert (outcome.ending.failure.kind, outcome.ending.failure.detail) == ("refused", "no GPU here")
    assert describe_failure(outcome.ending.failure) in capsys.readouterr().err
    assert RunFolder.open(outcome.folder).end == EndReason("failed")


def test_a_run_that_is_stopped_before_it_begins_leaves_no_folder(tmp_path):
    stop = Stop()
    stop.request()
    assert run(cartpole(tmp_path / "runs"), stop=stop) is None
    assert show(None) == FINISHED
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_moves_the_run(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = TransportConfig(experience_port=listener.getsockname()[1])
        outcome = run(dataclasses.replace(cartpole(tmp_path), transport=taken), FINISHES)
    assert outcome.config.transport.port_offset > 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--preset", "nosuch"], "nosuch"),
        (["--actors", "-1"], "actor.num_actors"),
        (["--replay.capactiy", "7"], "capactiy"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv-v0"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(arguments, name, capsys):
    assert main(arguments) == REFUSED
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex train: ")
    assert name in errors[0]
