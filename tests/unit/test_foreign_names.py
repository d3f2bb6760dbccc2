"""A file or a learner names a module that the user has not trusted: no command imports the module or calls anything."""

import importlib
import sys
from contextlib import suppress

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from support.builders import VECTORS
from support.hostile import HostileRun, names, plant

import apex
from apex import learner
from apex.acting import service as acting
from apex.acting.worker import run_worker
from apex.environments.inspection import Inspector
from apex.evaluation import command as evaluation
from apex.evaluation import service as evaluating
from apex.evaluation import watch
from apex.evaluation.export import command as export
from apex.launch import train
from apex.launch.preflight import doctor
from apex.runs.plots import command as plot
from apex.runs.report import command as report
from apex.transport.hello import Route, Welcome
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.types import Stream


def make_welcome(config):
    return Welcome(
        route=Route("127.0.0.1", 9),
        session=1,
        run_id=7,
        config=config,
        schema=VECTORS,
        num_parameters=4,
        memory="",
        replay=[],
        streams=[Stream(3, 1)],
    )


# name -> function of a hostile run; returns an exit status, or raises
COMMANDS = {
    "evaluate a model": lambda run: evaluation.main([str(run.model), "--episodes", "1"]),
    "evaluate": lambda run: evaluation.main([str(run.path), "--episodes", "1"]),
    "evaluate --checkpoint last": lambda run: evaluation.main([str(run.path), "--checkpoint", "last"]),
    "watch": lambda run: watch.main([str(run.path), "--out", "game.gif", "--seconds", "0.1"]),
    "report": lambda run: report.main([str(run.path), "--no-video"]),
    "export": lambda run: export.main([str(run.path), "--episodes", "1"]),
    "plot": lambda run: plot.main([str(run.path), "--out", "curves.png"]),
    "train --resume": lambda run: train.main(["--resume", str(run.path)]),
    "train --config": lambda run: train.main(["--config", str(run.toml)]),
    "doctor --resume": lambda run: doctor.main(["--resume", str(run.path), "--json"]),
    "doctor --config": lambda run: doctor.main(["--config", str(run.toml), "--json"]),
    "learner --run-folder": lambda run: learner.open_run(["--run-folder", str(run.path)], Inspector()),
    "learner --config": lambda run: learner.open_run(["--config", str(run.toml)], Inspector()),
    "load_policy": lambda run: apex.load_policy(run.model).make_environment().reset(),
    "load_policy of a run": lambda run: apex.load_policy(run.path).make_environment().reset(),
    "apex.evaluate": lambda run: apex.evaluate(run.path, 1),
    "apex.export": lambda run: apex.export(run.path, episodes=1),
    "actor": lambda run: acting.run_service(make_welcome(run.config), 1, run_worker, Stop()),
    "evaluator": lambda run: evaluating.run_service(make_welcome(run.config), Stop()),
}
READ_NO_NAME = ("report", "plot")
# Of the other settings than the environment, they try few names: they start a process for each, or draw charts.
SLOW = {"report": (), "doctor --resume": (), "doctor --config": (), "train --resume": ("os:system", "canary:make")}
# They accept names of this package, and would start processes, which then refuse these names as the others do.
START_PROCESSES = ("learner --run-folder", "actor", "evaluator")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    plant(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return [
        HostileRun(folder, setting, value, args)
        for setting in ("environment.id", "network.factory", "algorithm")
        for value, args in names(folder).items()
        if setting == "environment.id" or not value.startswith("apex.")
    ]


@pytest.fixture
def imports(monkeypatch):
    """The names of all modules that are imported by name."""
    imported = []

    def import_module(name, package=None):
        imported.append(name)
        return original(name, package)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", import_module)
    return imported


def leaves_no_trace(folder):
    effects = [name for name in ("imported", "ran") if (folder / name).exists()]
    return not effects and not {"canary", "canary.inner"} & set(sys.modules)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_or_calls_what_a_stranger_names(
    command, runs, folder, imports, trusts_nothing, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for run in runs:
        module, is_own = run.value.partition(":")[0], run.value.startswith("apex.")
        if (is_own and command in START_PROCESSES) or (
            run.setting != "environment.id" and run.value not in SLOW.get(command, (run.value,))
        ):
            continue
        imports.clear()
        try:
            status = COMMANDS[command](run)
            said = "".join(capsys.readouterr())
        except UsageError as error:
            status, said = 2, str(error)
        assert leaves_no_trace(folder), run.value
        assert is_own or not {module, "canary"} & set(imports), run.value
        if command not in READ_NO_NAME:
            assert status, run.value
            assert run.setting in said, (run.value, said)
            assert run.value in said, (run.value, said)
            can_be_allowed = not is_own and module[0] != "."
            assert (f"--allow {module} " in said) == can_be_allowed, (run.value, said)


@pytest.mark.parametrize("value", ["canary:make", "canary:Id-v0"])
def test_allowed_module_is_imported(value, trusts_nothing, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plant(tmp_path)
    run = HostileRun(tmp_path, "environment.id", value, {})
    for evaluate in (
        lambda: evaluation.main([str(run.model), "--allow", "canary"]),
        lambda: apex.load_policy(run.model, allow="canary").make_environment().reset(),
    ):
        monkeypatch.setattr("apex.runtime.trust._allowed", set())
        with suppress(UsageError):  # It has no environment.
            evaluate()
        assert (tmp_path / "imported").exists()
        (tmp_path / "imported").unlink()
        del sys.modules["canary"]


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"id": "__main__:Game"}},
        {"environment": {"id": "Cell-v0"}},
        {"network": {"factory": "__main__:Net"}},
        {"algorithm": "__main__:Algorithm"},
    ],
)
def test_code_of_a_notebook_cell_is_refused_with_the_remedy(changes, monkeypatch):
    cell = type("Game", (), {"__module__": "__main__"})
    monkeypatch.setitem(gymnasium.registry, "Cell-v0", EnvSpec("Cell-v0", entry_point=cell))
    with pytest.raises(apex.ConfigError) as refused:
        apex.train(apex.preset("cartpole", **changes))
    (value,) = changes.values()
    assert repr(value if isinstance(value, str) else next(iter(value.values()))) in refused.value.problem
    assert "%%writefile" in refused.value.remedy


def test_callable_is_no_argument_of_an_environment():
    with pytest.raises(apex.ConfigError, match=r"environment\.args"):
        apex.preset("cartpole", environment={"args": {"args": print}})
