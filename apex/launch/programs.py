"""The programs of a run on one machine: how each is started, restarted and stopped."""

import sys
from functools import partial

from apex.config import Config
from apex.config.role_command import OptionValue, module_command, role_command
from apex.launch.monitor import RunMonitor
from apex.runs.folder import RunFolder
from apex.runtime.supervisor import Program
from apex.runtime.trust import allow_options
from apex.transport.hello import advertised_host, local_host
from apex.types import Role

PYTHON = (sys.executable, "-u", "-P", "-m")  # See `find_package`.
SAVING_SECONDS = 120.0  # further time for the last checkpoint, while the learner sends heartbeats
NICE = 10  # niceness of programs that only observe the run


def make_programs(config: Config, folder: RunFolder, watch: RunMonitor) -> list[Program]:
    """Returns the programs of a run in the order of their start. They are stopped in reverse order.

    The sum of their grace periods is less than 10 s, the time within which a run stops unless its learner saves for
    longer, as with a large network or on a slow disk. `watch` knows whether the run is ending; then programs that are
    not needed any more do not start again.
    """
    run, shards = config.run, range(config.replay.num_shards)
    role = partial(Program, stuck_seconds=run.stuck_seconds, crash_budget=run.crash_budget)
    learner = (*role_command(Role.LEARNER, run_folder=folder.path), *allow_options())
    snapshots = folder.checkpoints / "replay" if config.checkpoint.replay else None
    advertised = advertised_host(config.transport) if run.head else None
    programs = [
        role(
            role=f"replay-{shard}" if len(shards) > 1 else "replay",
            command=_command(config, Role.REPLAY, shard=shard, snapshots=snapshots, advertise=advertised),
            grace_seconds=1.5,
            stops_with="replay",
            ready=lambda: not watch.ending,
        )
        for shard in shards
    ]
    command, saving = (*PYTHON, *module_command(learner)), SAVING_SECONDS
    programs.append(role(role="learner", command=command, grace_seconds=4.0, saving_seconds=saving, ends_run=True))
    evaluator = role(
        role="evaluator",
        command=(*_command(config, Role.EVALUATOR), *allow_options()),
        grace_seconds=1.0,
        # With a stop score, the run waits for evaluations. Beside busy actors, niceness makes them ten times slower.
        niceness=NICE if run.stop_score is None else 0,
        ready=lambda: watch.evaluating or not watch.ending,
    )
    actor = role(
        role="actor",
        command=(*_command(config, Role.ACTOR), *allow_options()),
        grace_seconds=2.0,
        ready=lambda: not watch.ending,
    )
    where = ("--logdir", folder.tensorboard, "--host", run.tensorboard_bind, "--port", run.tensorboard_port)
    tensorboard = Program(
        role="tensorboard",
        command=(*PYTHON, "tensorboard.main", *map(str, where), "--reload_interval", "5"),
        crash_budget=1.0,
        grace_seconds=0.5,
        essential=False,
        niceness=NICE,
        ready=lambda: watch.training and not watch.ending,  # Starting TensorBoard takes seconds of CPU time.
    )
    return [
        *([tensorboard] if run.tensorboard else []),
        *programs,
        *([evaluator] if config.evaluator.enabled else []),
        *([] if run.head else [actor]),
    ]


def _command(config: Config, role: Role, **options: OptionValue) -> tuple[str, ...]:
    """Returns the command of a role that joins the learner on this host."""
    transport = config.transport
    arguments = role_command(
        role,
        learner=f"{local_host(transport)}:{transport.port('control')}",
        keys=transport.keys,
        insecure_no_auth=transport.insecure_no_auth,
        **options,
    )
    return (*PYTHON, *module_command(arguments))
