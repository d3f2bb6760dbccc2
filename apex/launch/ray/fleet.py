"""The driver's view of a run's units: Ray places them; the driver sends them orders, and again after a unit is lost."""

import logging
import os
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from apex.config import Config, from_dict, to_dict
from apex.config.role_command import module_command, role_command
from apex.facts import Ending, Failure, FailureKind, LogEntry, UnitEvent, UnitEventKind
from apex.launch.engine import RayEngine
from apex.launch.mirroring import TRY_SECONDS
from apex.launch.preflight import requirements
from apex.launch.ray.cluster import ControlService, Needs, make_actor_host, make_head
from apex.launch.ray.order import Order, Report
from apex.launch.ray.unit import Place
from apex.runtime.supervisor import REST_SECONDS, CrashBudget
from apex.types import Role
from apex.version import VERSION
from apexreplay.errors import FAILED, FINISHED, NEIGHBOUR_GONE, REFUSED
from apexreplay.process.lifecycle import POLL_SECONDS

PENDING_SECONDS = 5.0  # time a unit may wait for a node before a message names what it waits for
AGAIN_SECONDS = 1.0  # time between two requests to a unit that Ray is restarting
READ_SECONDS = 1.0  # time between two reads of a unit's reports
GRACE_SECONDS = 15.0  # time for units to end their programs, which normally need less

log = logging.getLogger("apex")


@dataclass(eq=False)
class Fleet:
    """The head and the actor hosts."""

    ray: Any
    config: Config
    engine: RayEngine
    folder: Path  # the driver's folder
    keys: dict[str, dict[str, str]]  # of each unit: file name -> text
    gpu: bool  # whether the head needs a GPU
    argv: Sequence[str]
    begun: bool  # whether the head has created the run folder
    continues: bool  # whether the command has --continue, so that the run may be in its mirror
    notify: Callable[[UnitEvent], None]  # is called with each event
    show: Callable[[tuple[str, LogEntry]], None]  # is called with each entry of the units' logs and the log's name

    def __post_init__(self) -> None:
        self._actors: list[Member] = []
        self._learner = ""  # HOST:PORT of the learner's control socket; "" while unknown
        self._service = ControlService(self.ray.get_runtime_context().gcs_address)
        cuda = requirements.CUDA_BYTES if self.gpu else 0
        # The replay memory counts only if its size is given: otherwise the head chooses it for its host.
        programs = requirements.OTHER_PROGRAM_BYTES + requirements.TRAINER_BYTES + cuda
        needs = Needs(self.engine.head_cpus, programs + self.config.replay.max_bytes, int(self.gpu))
        handle, self._group = make_head(self.ray, f"{self.config.run.name}/head", needs)
        self._head = Member(self, "head", handle, self._order_head, needs, supervises=True)

    def check(self) -> Ending | None:
        """Checks all units and sends due orders; returns an ending if the run has ended."""
        if self._service.is_lost():
            return Ending(NEIGHBOUR_GONE, "ray", Failure(role="ray", kind="silent", detail=self._service.address))
        if self._service.is_silent:
            return None
        if (ending := self._head.check()) is not None:
            return ending
        if self._head.running and not self._actors:  # Created earlier, they might take the head's CPUs.
            run, processes = self.config.run.name, self.engine.cpus_per_host
            environments = self.config.actor.envs_per_process * requirements.ENVIRONMENT_BYTES
            needs = Needs(processes, processes * (requirements.ACTOR_PROCESS_BYTES + environments))
            self._actors = [
                Member(self, name, make_actor_host(self.ray, f"{run}/{name}", needs), self._order_actor, needs)
                for name in (f"actor-{index}" for index in range(self.engine.actor_hosts))
            ]
        for member in list(self._actors):
            if (ending := member.check()) is None:
                continue
            if ending.status == FINISHED:
                member.rest(REST_SECONDS)  # Perhaps the whole run is ending.
                continue
            self._actors.remove(member)
            member.give_back(deadline=0.0)
            self.notify(UnitEvent(unit=member.name, kind="abandoned", failure=ending.failure))
            if not self._actors:
                return Ending(FAILED, ending.role, ending.failure)
        return None

    def end(self) -> None:
        """Ends all programs: first the actors, then the head, which saves the run."""
        while not (lost := self._service.is_lost()) and self._service.is_silent:  # One missing answer decides nothing.
            time.sleep(POLL_SECONDS)
        if lost:  # Nobody tells when they have ended.
            for member in (*self._actors, self._head):
                member.request_stop()
            return
        for group in (self._actors, [self._head]):
            for member in group:
                member.request_stop()
            deadline = time.monotonic() + GRACE_SECONDS + (TRY_SECONDS if self.config.run.mirror else 0.0)
            for member in group:
                member.give_back(deadline)
        self.ray.util.remove_placement_group(self._group)

    def follow_head(self, config_toml: str) -> None:
        """Reads the address of the learner from the head's configuration. If it is new, actors get new orders."""
        self.begun = True
        self.head_config = config = from_dict(tomllib.loads(config_toml))
        learner = f"{config.transport.bind}:{config.transport.port('control')}"
        if learner == self._learner:
            return
        self._learner = learner
        curves = f"{config.run.tensorboard_bind}:{config.run.tensorboard_port}" if config.run.tensorboard else ""
        self.notify(UnitEvent(unit="head", kind="learner", address=learner, tensorboard=curves))
        for member in self._actors:
            member.request_stop()

    def _order_head(self, name: str, place: Place) -> Order:
        transport = replace(self.config.transport, bind=place.address, keys="keys")
        run = to_dict(replace(self.config, transport=transport))
        cores = self.engine.head_cpus
        continues = self.begun or self.continues
        known = {"run": run, "begun": self.begun, "continues": continues}
        return self._order(name, "keys", **known, cores=cores, argv=tuple(self.argv))

    def _order_actor(self, name: str, place: Place) -> Order | None:
        if not self._learner:
            return None
        keys, envs = self.folder / name / "keys", self.config.actor.envs_per_process
        processes = self.engine.cpus_per_host
        command = role_command(Role.ACTOR, learner=self._learner, keys=keys, processes=processes, envs=envs)
        return self._order(
            name,
            name,
            arguments=module_command(command),
            stuck_seconds=self.config.run.stuck_seconds,
        )

    def _order(self, name: str, bundle: str, **what: Any) -> Order:
        return Order(name=name, home=str(self.folder / name), keys=self.keys[bundle], **what)


@dataclass(eq=False)
class Member:
    """One unit, across its restarts."""

    fleet: Fleet
    name: str
    handle: Any
    order: Callable[[str, Place], Order | None]  # returns the next order; None if it cannot be created yet
    needs: Needs
    supervises: bool = False  # the guard restarts its programs itself, each within its own budget

    def __post_init__(self) -> None:
        self._budget = CrashBudget(self.fleet.config.run.crash_budget)
        self._place: Place | None = None
        self._placing: Any = None  # pending request for the unit's place
        self._run: Any = None  # pending result of the unit's order
        self._reading: Any = None  # pending request for the guard's reports
        self._read_at = self._again_at = self._notify_at = 0.0

    @property
    def running(self) -> bool:
        """Whether the unit executes an order, as far as the driver knows."""
        return self._run is not None

    def check(self) -> Ending | None:
        """Sends due requests; returns an ending if this unit must not restart."""
        try:
            return self._check(time.monotonic())
        except self.fleet.ray.exceptions.ActorUnavailableError:
            if self._place is not None:
                self._notify("lost")
            self.rest(AGAIN_SECONDS)
            return None
        except self.fleet.ray.exceptions.RayError as error:
            log.warning("%s: %s", self.name, error)
            last_line = str(error).strip().rpartition("\n")[2]
            return self._restart(Failure(role=self.name, kind="error", detail=last_line, unit=self.name))

    def _check(self, now: float) -> Ending | None:
        if self._run is not None:
            self._read_reports(now)
            result = self._take(self._run)
            return None if result is None else self._handle_end(*result)
        if now < self._again_at:
            return None
        if self._place is None:
            self._placing = self._placing or self.handle.where.remote()
            if (answer := self._take(self._placing)) is None:
                self._notify_waiting(now)
                return None
            self._placing, self._notify_at = None, 0.0
            self._place = place = Place(*answer)
            if place.version != VERSION:
                detail = f"{place.host} ({place.address}) has apex {place.version}, not {VERSION}"
                return Ending(REFUSED, self.name, Failure(role=self.name, kind="refused", detail=detail))
            self._notify("placed", host=place.host, address=place.address)
        if (order := self.order(self.name, self._place)) is not None:
            self._run = self.handle.run.remote(order.encode(), os.getcwd())
        return None

    def _read_reports(self, now: float) -> None:
        if self._reading is None and now >= self._read_at:
            self._read_at = now + READ_SECONDS
            self._reading = self.handle.read_reports.remote()
        if self._reading is not None and (reports := self._take(self._reading)) is not None:
            self._reading = None
            self._handle_reports(reports)

    def _handle_reports(self, reports: list[str]) -> None:
        for report in map(Report.decode, reports):
            if report.config_toml:
                self.fleet.follow_head(report.config_toml)
            elif report.entry is not None:
                self.fleet.show((report.log, report.entry))

    def _handle_end(self, status: int, last: str, reports: list[str]) -> Ending | None:
        """Decides after the guard has ended: returns an ending, or None to run its programs again."""
        earlier = None if self._reading is None else self._take(self._reading, READ_SECONDS)
        self._handle_reports([*(earlier or []), *reports])
        ending = Report.decode(last).ending if last else None
        if status == NEIGHBOUR_GONE:
            self.rest(AGAIN_SECONDS)
            return None
        if ending is None:  # The guard was killed, or failed itself.
            kind: FailureKind = "signal" if status < 0 else "exit"
            return self._restart(Failure(role="guard", kind=kind, value=abs(status), unit=self.name))
        failure = ending.failure and replace_fields(ending.failure, unit=self.name)
        if failure is None or self.supervises or ending.status == REFUSED:
            return Ending(ending.status, self.name, failure)
        return self._restart(failure)

    def _restart(self, failure: Failure) -> Ending | None:
        """Sends the order again after a pause; returns an ending if the crash budget is used up."""
        pause = self._budget.charge(1.0, time.monotonic())
        if pause is None:
            return Ending(FAILED, self.name, failure)
        self._notify("restarting", failure=failure)
        self.rest(max(pause, AGAIN_SECONDS))
        return None

    def _notify(self, kind: UnitEventKind, **facts: Any) -> None:
        self.fleet.notify(UnitEvent(unit=self.name, kind=kind, **facts))

    def _notify_waiting(self, now: float) -> None:
        self._notify_at = self._notify_at or now + PENDING_SECONDS
        if now >= self._notify_at:
            self._notify_at = now + 10 * PENDING_SECONDS
            ray = self.fleet.ray
            free, total = ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0)
            cpus, memory, gpus = self.needs
            needs = {"cpus": cpus, "memory": memory, "gpu": gpus > 0}
            self._notify("waiting", **needs, free_cpus=free, total_cpus=total)

    def rest(self, seconds: float) -> None:
        """Waits for `seconds`, then requests the unit's place and sends its order again."""
        self._run = self._placing = self._place = self._reading = None
        self._again_at = time.monotonic() + seconds

    def request_stop(self) -> None:
        """Makes the unit end its programs. Later calls of `check` send the next order."""
        if self.running:
            self.handle.stop.remote()

    def give_back(self, deadline: float) -> None:
        """Waits until the unit's programs have ended, at most until `deadline`, then removes the unit from Ray."""
        if self._run is not None:
            self.fleet.ray.wait([self._run], timeout=max(0.0, deadline - time.monotonic()))
            with suppress(self.fleet.ray.exceptions.RayError):
                if (result := self._take(self._run)) is not None:
                    self._handle_reports(result[2])
        self.fleet.ray.kill(self.handle)

    def _take(self, reference: Any, timeout: float = 0.0) -> Any:
        """Returns the result of a remote call, or None if the call is still pending after `timeout` seconds."""
        return self.fleet.ray.get(reference) if self.fleet.ray.wait([reference], timeout=timeout)[0] else None
