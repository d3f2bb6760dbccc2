"""The scenarios of `python -m chaos`: the faults of a run, and the figures that are measured."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from apexreplay.errors import UsageError
from chaos.environment import PACED_ID
from chaos.faults import KINDS, RARE_ROUNDS, ROUND_TRIP_SECONDS, draw, draw_kills
from chaos.growth import growth_figures, settled_footprints
from chaos.processes import Process, kill, send
from chaos.proxy import Proxy
from chaos.recovery import LIMIT_SECONDS, FaultInjector, name_of
from chaos.report import Figure, ScenarioReporter, recovery_figures
from chaos.run import ChaosRun

BARS = {"replay": 2.0, "learner": 15.0, "actor": 5.0}  # seconds for a role to recover
CALM_SECONDS = 30.0  # time without a fault, for comparison
PARTITION_SECONDS = 10.0
KILL_SECONDS = 7.0  # time between two kills, even if the first victim has not recovered
AUDIT_EVERY = 20  # kills in a scenario
SETTLE_SECONDS = 60.0  # time before memory is measured, because a process uses less memory just after a restart
GOES_ON = "the run continues after the last fault"
ABORTS = "aborted programs"
NEIGHBOURS = "second runs that failed"
ESSENTIAL = (GOES_ON, ABORTS, NEIGHBOURS)  # figures whose bars every run must meet
KILLED = (
    (("actor",),),
    (("actor", "learner", "learner's loader"), ("replay", "launcher")),
)  # frequent and rare victims by part
SLOW_HOSTS = (1, 1, 1)  # streams of the slow, the stopped and the vanished host
SLOW_SHARE = 0.1  # share of the time in which a slow actor runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """The options."""

    seed: int = 0
    minutes: float = 5.0  # duration of the faults; for far-actor and slow-actors, of each measurement
    period: float = 30.0  # seconds between two faults
    faults: tuple[str, ...] = KINDS
    rounds: int = 50  # kills of each role
    part: int = 0  # the run of the scenario, from 1; 0: all its runs
    size: int = 1_000_000  # transitions in the replay memory before replay is killed

    def __post_init__(self) -> None:
        draw(self.seed, 0.0, self.period, self.faults)  # Raises UsageError for unknown kinds.


Scenario = Callable[[ChaosRun, Proxy, FaultInjector, ScenarioReporter, ScenarioOptions], list[Figure]]


def random_faults(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Applies random faults, and compares the learner's updates with those of a calm time."""
    calm_seconds = min(CALM_SECONDS, 30.0 * options.minutes)
    calm = _updates(run, lambda: run.wait(calm_seconds)) / calm_seconds
    faults = draw(options.seed, 60 * options.minutes, options.period, options.faults)
    for fault in faults:
        reporter.say(fault.sentence())
    reporter.say(f"{len(faults)} faults, seed {options.seed}")
    before, began = run.num_acknowledged, time.monotonic()

    def suffer() -> None:
        for fault in faults:
            injector.wait(began + fault.at - time.monotonic())
            injector.do(fault)
            reporter.say(f"{time.monotonic() - began:7.1f} s  done: {fault.sentence().strip()}")
        injector.wait(began + 60 * options.minutes - time.monotonic())

    net = _updates(run, suffer)
    seconds, acknowledged = time.monotonic() - began, run.num_acknowledged - before
    calm_down = _calm_down(run, proxy, injector)
    return [
        Figure("faults", len(faults)),
        *_kill_figures(injector),
        Figure("resumes after a launcher's death", run.num_resumes, "times"),
        Figure("acknowledged under faults", acknowledged, "transitions"),
        Figure("updates without faults", calm, "/s"),
        Figure("updates under faults, without repeated ones", net / seconds, "/s"),
        Figure("share of updates under faults", 100 * net / seconds / calm if calm else None, "%", ">= 80"),
        Figure(NEIGHBOURS, injector.failed_neighbours, "", "= 0"),
        Figure(ABORTS, run.count_aborts(), "", "= 0"),
        *calm_down,
    ]


def kills(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Kills actors in a run whose inserts wait for samples, then all roles in a run whose inserts do not."""
    times: dict[str, list[float | None]] = {}
    for number, victim in enumerate(draw_kills(options.seed, options.rounds, *KILLED[options.part - 1]), 1):
        recovery = injector.kill_and_wait(victim, KILL_SECONDS)
        times.setdefault(name_of(victim), []).append(recovery.seconds)
        came = "not recovered yet" if recovery.seconds is None else f"recovered after {recovery.seconds:.1f} s"
        reporter.say(f"{number:4d}  kill -9 {victim}: {came}")
        if number % AUDIT_EVERY == 0:
            reporter.say(f"      audit {run.look().judge().sentence()}")
    rows = _kill_figures(injector)
    calm = _calm_down(run, proxy, injector)
    aborts = Figure(ABORTS, run.count_aborts(), "", "= 0")
    return [*rows, *recovery_figures(times, {}), aborts, *calm]


def neighbours(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Kills the whole run, starts and ends a second run, and resumes the first one."""
    for number in range(1, options.rounds + 1):
        injector.start_and_end_a_second_run(while_killed=True)
        goes_on = run.wait(LIMIT_SECONDS, _more_acknowledged(run))
        reporter.say(f"{number:4d}  killed, second run, resumed: {'goes on' if goes_on else 'does not go on'}")
        if number % AUDIT_EVERY == 0:
            reporter.say(f"      audit {run.look().judge().sentence()}")
    return [
        Figure("kill -9 of the whole run", injector.kills.get("launcher", 0)),
        Figure(NEIGHBOURS, injector.failed_neighbours, "", "= 0"),
        *_calm_down(run, proxy, injector),
    ]


def recoveries(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Measures the recovery of each role after SIGKILL, one at a time, with `size` transitions in memory."""
    reporter.say(f"waits for {options.size:,} transitions")
    if not run.wait(3_600.0, lambda: run.num_stored >= options.size):
        raise UsageError(f"only {run.num_stored:,} transitions were stored in an hour; use a smaller --size")
    times: dict[str, list[float | None]] = {}
    for _ in range(options.rounds):
        for role in BARS:
            recovery = injector.kill_and_wait(role)
            times.setdefault(role, []).append(recovery.seconds)
            reporter.say(
                f"kill -9 {role}: {'not recovered' if recovery.seconds is None else f'{recovery.seconds:.1f} s'}"
            )
            run.wait(options.period)
    return [*recovery_figures(times, BARS), *_calm_down(run, proxy, injector)]


def partition(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Blocks all data between actors and replay for 10 s without an error; then the same with resets."""
    figures = []
    for kind, name in (("is_silent", "silent"), ("is_cut", "reset")):
        run.wait(5.0)
        calm = _acknowledged(run, lambda: run.wait(PARTITION_SECONDS)) / PARTITION_SECONDS
        reporter.say(f"partition of {PARTITION_SECONDS:g} s between actors and replay, connections {name}")
        proxy.set("actor-replay", **{kind: True})
        run.wait(PARTITION_SECONDS)
        proxy.set("actor-replay", **{kind: False})
        began = time.monotonic()
        back = run.wait(60.0, _more_acknowledged(run))
        figures.append(Figure(f"{name}: acknowledged again after", time.monotonic() - began if back else None, "s"))
        run.wait(5.0)
        after = _acknowledged(run, lambda: run.wait(PARTITION_SECONDS)) / PARTITION_SECONDS
        figures.append(
            Figure(f"{name}: rate after relative to before", 100 * after / calm if calm else None, "%", ">= 90")
        )
    return [*figures, *_calm_down(run, proxy, injector)]


def far_actor(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """All actors run on one host with 250 ms round trip to learner and replay."""
    for pair in ("actor-replay", "actor-learner"):
        proxy.set(pair, delay=ROUND_TRIP_SECONDS / 2)
    reporter.say(f"{1000 * ROUND_TRIP_SECONDS:.0f} ms round trip between actors and all other programs")
    run.wait(10.0)
    seconds = 60 * options.minutes
    rate = _acknowledged(run, lambda: run.wait(seconds)) / seconds
    return [
        Figure("from one actor host at 250 ms", rate, "transitions/s", ">= 1300"),
        *_calm_down(run, proxy, injector),
    ]


def slow_actors(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Of 32 actors, one runs a tenth of the time, one is stopped, and one is killed whenever it starts."""
    run.wait(60.0, lambda: len(set().union(*run.ledger.actors.values())) == sum(HOSTS["slow-actors"]))
    hosts = _actor_hosts(run)
    if len(hosts) != 1 + len(SLOW_HOSTS):
        raise UsageError(f"found {len(hosts)} actor hosts, expected {1 + len(SLOW_HOSTS)}")
    many, slow, stopped, gone = hosts
    pids = {process.pid for process in many}
    ids = set().union(*(run.ledger.actors.get(pid, set()) for pid in pids))
    seconds = 60 * options.minutes

    def rate(look: Callable[[], object]) -> float:
        before, began = _count(run, ids), time.monotonic()
        while time.monotonic() < began + seconds:
            look()
            run.tick()
        run.read()
        return (_count(run, ids) - before) / (time.monotonic() - began)

    calm = rate(lambda: None)
    reporter.say(f"of {len(ids) + len(SLOW_HOSTS)} actors one becomes slow, one is stopped, one vanishes")
    known = {process.pid for host in (many, slow, stopped) for process in host}
    for process in stopped:
        send(process.pid, signal.SIGSTOP)

    def look() -> None:
        runs = time.monotonic() % 1.0 < SLOW_SHARE
        for process in slow:
            send(process.pid, signal.SIGCONT if runs else signal.SIGSTOP)
        for process in run.processes():
            if process.role == "actor" and process.pid not in known:
                kill(process)

    for process in gone:
        kill(process)
    faulty = rate(look)
    for process in (*slow, *stopped):
        send(process.pid, signal.SIGCONT)
    return [
        Figure(f"the other {len(ids)} before", calm, "transitions/s"),
        Figure(f"the other {len(ids)} meanwhile", faulty, "transitions/s"),
        Figure("rate under faults relative to before", 100 * faulty / calm if calm else None, "%", ">= 95"),
        *_calm_down(run, proxy, injector),
    ]


def soak(
    run: ChaosRun, proxy: Proxy, injector: FaultInjector, reporter: ScenarioReporter, options: ScenarioOptions
) -> list[Figure]:
    """Applies faults for a long time, and measures each role at the middle and at the end, after replay is full."""
    half = 30 * options.minutes
    first = random_faults(run, proxy, injector, reporter, _half(options, 0))
    replay = run.status.replay if run.status is not None else None
    full = replay is not None and (replay.size or 0) >= 0.99 * replay.capacity
    settle = min(SETTLE_SECONDS, 6 * options.minutes)
    middle = settled_footprints(run, settle)
    second = random_faults(run, proxy, injector, reporter, _half(options, 1))
    end = settled_footprints(run, settle)
    figures = [Figure("replay was full at half time", float(full), "", "= 1")]
    figures += growth_figures(middle, end, f"in {half / 60:g} min")
    halves = [figure._replace(name=f"first half: {figure.name}") for figure in first]
    halves += [figure._replace(name=f"second half: {figure.name}") for figure in second]
    return [*halves, *figures]


class ScenarioEntry(NamedTuple):
    """A scenario: purpose in one line, function, and the ScenarioOptions that it uses."""

    play: Scenario
    summary: str
    settings: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ((),)  # runs, one after the other, with these options of `apex train`


RANDOM = ("minutes", "period", "faults")
SCENARIOS: dict[str, ScenarioEntry] = {
    "random": ScenarioEntry(random_faults, "faults of every kind, drawn from --seed (the default)", RANDOM),
    "kills": ScenarioEntry(
        kills,
        "kill -9 of actors, --rounds times, while inserts wait for samples; then of actors, learner and "
        f"loaders while they do not, and of replay and launcher in every {RARE_ROUNDS}th round",
        ("rounds", "part"),
        (
            ("--replay.samples-per-insert", "8", "--replay.inserts-wait"),
            # The rate is limited, so that the audit can read all transitions of an hour before they are overwritten.
            ("--env", PACED_ID, "--replay.samples-per-insert", "8"),
        ),
    ),
    "neighbours": ScenarioEntry(
        neighbours,
        "kill -9 of the whole run, --rounds times, and each time a second run before its resume",
        ("rounds",),
    ),
    "recovery": ScenarioEntry(
        recoveries,
        "recovery time of each role after kill -9, --rounds times, with --size transitions in memory",
        ("rounds", "size", "period"),
    ),
    "partition": ScenarioEntry(partition, "a partition of 10 s between actors and replay", ()),
    "far-actor": ScenarioEntry(far_actor, "one actor host with 250 ms round trip", ("minutes",)),
    "slow-actors": ScenarioEntry(slow_actors, "a slow, a stopped and a vanished actor among 32", ("minutes",)),
    "soak": ScenarioEntry(soak, "faults for --minutes; growth of memory and descriptors", RANDOM),
}
DEFAULTS: dict[str, dict[str, float]] = {  # settings that differ from the defaults of ScenarioOptions
    "kills": {"rounds": 100},
    "neighbours": {"rounds": 100},
    "recovery": {"rounds": 5},
    "far-actor": {"minutes": 1.0},
    "slow-actors": {"minutes": 0.5},
}
HOSTS: dict[str, tuple[int, ...]] = {"slow-actors": (29, *SLOW_HOSTS)}  # streams of each actor host
OPTIONS: dict[str, tuple[str, ...]] = {  # options of `apex train` that differ from the usual ones
    "far-actor": ("--actors", "16"),
    # Other actors cannot gain from the cores of actors that wait.
    "slow-actors": ("--actors", "32", "--env", PACED_ID),
    "soak": ("--replay.capacity", "100000"),
}


def _kill_figures(injector: FaultInjector) -> list[Figure]:
    return [Figure(f"kill -9 of {target}", count) for target, count in sorted(injector.kills.items())]


def _more_acknowledged(run: ChaosRun) -> Callable[[], bool]:
    before = run.num_acknowledged
    return lambda: run.num_acknowledged > before


def _updates(run: ChaosRun, during: Callable[[], object]) -> int:
    before = run.most_updates
    during()
    return run.most_updates - before


def _acknowledged(run: ChaosRun, during: Callable[[], object]) -> int:
    run.read()
    before = run.num_acknowledged
    during()
    run.read()
    return run.num_acknowledged - before


def _count(run: ChaosRun, actor_ids: set[int]) -> int:
    entries = run.ledger.entries
    return sum(len(entries.sent[key]) for key in entries.acknowledged if key[0] in actor_ids)


def _actor_hosts(run: ChaosRun) -> list[list[Process]]:
    """Returns the processes of each actor host, by descending number of streams, then by process id."""
    processes = [process for process in run.processes() if process.role == "actor"]
    hosts = [
        [process, *(child for child in processes if child.parent == process.pid)]
        for process in processes
        if not process.is_child
    ]

    def streams(host: list[Process]) -> int:
        return len(set().union(*(run.ledger.actors.get(process.pid, set()) for process in host)))

    return sorted(hosts, key=lambda host: (-streams(host), host[0].pid))


def _half(options: ScenarioOptions, number: int) -> ScenarioOptions:
    return ScenarioOptions(
        seed=options.seed + number, minutes=options.minutes / 2, period=options.period, faults=options.faults
    )


def _calm_down(run: ChaosRun, proxy: Proxy, injector: FaultInjector) -> list[Figure]:
    """Ends all faults, and waits until experience arrives and the learner makes updates."""
    while injector.busy:
        run.tick()
        injector.tick()
    proxy.heal()
    stored, updates, began = run.num_acknowledged, run.num_updates, time.monotonic()
    goes_on = run.wait(120.0, lambda: run.num_acknowledged > stored and run.num_updates > updates)
    return [Figure(GOES_ON, time.monotonic() - began if goes_on else None, "s", "<= 120")]
