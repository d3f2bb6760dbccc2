"""The learner's front desk: hello, leases, heartbeats, metrics and the end of the run, in a process of its own.

It is a child of the learner, so that a long gradient step keeps nobody waiting. The two talk by a pipe: the trainer
reports once a second, the coordinator says where replay is and when to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from apex.config import Config, to_dict
from apex.dqn.exploration import epsilon_ladder
from apex.learning.coordinator.leases import LeaseTable
from apex.learning.coordinator.metric_rows import MetricRows, evaluation_row
from apex.metric_tags import actor_tags
from apex.replay_memory.store.location import memory_id
from apex.runs.checkpoints.best_policy import BestPolicy, games_of
from apex.runs.folder import RunFolder
from apex.runs.metrics.truncate import cut_curves
from apex.runs.metrics.writer import MetricRow, MetricsWriter
from apex.runs.status import RunStatus
from apex.runtime.lifecycle import Stop, Wait
from apex.transport.async_receiver import PULL, ROUTER, AsyncReceiver, Peer
from apex.transport.codec import Codec, decode_request, encode_control
from apex.transport.curve.key_store import read_keys
from apex.transport.header import WIRE_VERSION, MessageKind, WireError, peek_kind
from apex.transport.json_codec import MAX_JSON_BYTES
from apex.transport.sockets import Context, InsecureBindWarning, open_context
from apex.types import Parameters, Progress, Schema, Stream

log = logging.getLogger("apex")

METRICS_PERIOD = 1.0  # seconds between two rows of curves
MAX_OBSERVERS = 64  # who are sent the last status without asking
END = {"type": "state", "stop": True}  # what is said of a run that is over
END_NOTICE_SECONDS = 3.0  # how long the end of the run is told to whoever still asks
MAX_ASKING = 1_000  # replay servers that wait for a shard
FORGET_SECONDS = 30.0  # a program that is silent for so long is shown no more


class CoordinatorConfig(NamedTuple):
    """What the coordinator is told at its start."""

    config: Config
    schema: Schema
    run_id: int
    num_actors: int
    epoch: int  # how often the learner of this run has started
    folder: Path


def run_coordinator(stop: Stop, desk: CoordinatorConfig, pipe: Connection, trainer_end: Connection) -> None:
    """The child's main function: returns when the trainer has finished or has closed its end of the pipe."""
    trainer_end.close()  # The child's copy of it, which would keep the pipe open for ever.
    asyncio.run(Coordinator(desk, pipe, stop).run())


class Coordinator:
    """Answers programs, keeps curves, and knows when the run is over."""

    def __init__(self, desk: CoordinatorConfig, pipe: Connection, stop: Stop) -> None:
        self._desk = desk
        self._config = desk.config
        self._pipe = pipe
        self._stop = stop
        self._codec = Codec(desk.run_id, desk.schema)
        self._leases = LeaseTable(desk.num_actors, desk.config.transport.lease_seconds, desk.epoch)
        self._folder = RunFolder.open(desk.folder)
        self._metrics = MetricsWriter(self._folder.path)
        self._status = RunStatus(
            desk.config,
            name=self._folder.path.name,
            folder=str(self._folder.path),
            num_actors=desk.num_actors,
            elapsed_seconds=self._folder.elapsed_seconds,
        )
        self._best_policy = BestPolicy(self._folder.checkpoints, desk.config, desk.schema)
        if self._best_policy.score is not None:
            self._status.evaluation = {"best": self._best_policy.score}
        self._rows = MetricRows(self._status)
        actor = desk.config.actor
        self._tags = actor_tags(epsilon_ladder(desk.num_actors, actor.epsilon_base, actor.epsilon_exponent).tolist())
        self._curves_began = False  # whether it is known how many steps they go on from
        self._num_parameters = 0  # unknown until the trainer has built its network; nobody is welcome before
        self._told: dict[str, Any] = {}
        self._ways: dict[int, bytes] = {}  # by session: to whom a state that nobody asked for is sent
        self._observers: deque[bytes] = deque(maxlen=MAX_OBSERVERS)  # who has asked for the status, the latest last
        self._asked: dict[int, float] = {}  # when a replay server first asked for a shard that another one may hold

    async def run(self) -> None:
        """Serves until the trainer is done, then tells everybody for a moment."""
        transport = self._config.transport
        with open_context(read_keys(transport.keys, "learner")) as context:
            wait = Wait("coordinator")
            while not self._num_parameters:  # The most that a message may take depends on it.
                wait.on("the trainer to make its network and to read its checkpoint")
                await asyncio.sleep(0.01)
                if self._stop.requested or not self._hear_trainer():
                    return
            self._control = AsyncReceiver(
                context,
                ROUTER,
                transport.endpoint("control"),
                "control",
                high_water_mark=1_000,
                max_bytes=2 * MAX_JSON_BYTES + 4 * self._num_parameters,
            )
            self._figures = AsyncReceiver(
                context,
                PULL,
                transport.endpoint("metrics"),
                "metrics",
                high_water_mark=10_000,
                max_bytes=MAX_JSON_BYTES,
            )
            tasks = [asyncio.create_task(work) for work in (self._serve_control(), self._serve_metrics())]
            try:
                await self._watch(tasks, context)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # They wait on sockets that close now.
                self._metrics.close()

    async def _watch(self, tasks: list[asyncio.Task[None]], context: Context) -> None:
        warning = InsecureBindWarning(self._config.transport)
        row_at, end_notice_until = time.monotonic(), 0.0
        while not self._stop.requested:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()  # Raises what ended it.
            context.check()
            warning.check()
            self._status.refused_connections = context.refused_connections
            if not self._hear_trainer():
                return
            if time.monotonic() >= row_at:
                row_at += METRICS_PERIOD
                for name, receiver in (("control", self._control), ("metrics", self._figures)):
                    self._status.refusals[name] = dict(receiver.refused)
                self._write_row()
                self._folder.elapsed_seconds = self._status.elapsed_seconds
                self._status.forget_silent(FORGET_SECONDS)
                self._ways = {session: way for session, way in self._ways.items() if session in self._status.members}
                self._leases.expire(time.monotonic())
            if not self._status.reason:
                self._status.reason = self._status.end_reason()
            self._tell_trainer()
            if self._status.finished:
                if not end_notice_until:
                    self._write_row()  # The curves end with the last update.
                    self._tell_members()
                end_notice_until = end_notice_until or time.monotonic() + END_NOTICE_SECONDS
                if not self._status.members or time.monotonic() >= end_notice_until:
                    self._tell_observers()
                    return

    def _tell_members(self) -> None:
        """Says that the run is over: to wait until each asks would take up to a heartbeat."""
        for session in self._status.members:
            if session in self._ways:
                self._control.reply(self._ways[session], encode_control(END, self._desk.run_id))

    def _tell_observers(self) -> None:
        """Says how it ended: the next time that one asks, nobody is here any more."""
        status = {"type": "status", **self._status.report(self._metrics.latest)}
        for observer in self._observers:
            self._control.reply(observer, encode_control(status, self._desk.run_id))

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _hear_trainer(self) -> bool:
        """Takes the trainer's reports; False when it is gone."""
        try:
            while self._pipe.poll():
                report = json.loads(self._pipe.recv_bytes())
                self._num_parameters = report.pop("num_parameters", self._num_parameters)
                if "progress" in report:
                    self._status.go_on(Progress(**report.pop("progress")))
                if "finished" in report:
                    self._status.reason = self._status.reason or report.pop("finished")
                    self._status.finished = True
                self._status.hear_trainer(report)
        except (EOFError, ConnectionResetError):
            return False
        return True

    def _tell_trainer(self) -> None:
        status = self._status
        news = {
            "replay": list(status.replay_endpoints),  # A copy: what was told must not change with it.
            "absent": status.absent_replay,
            "end": status.reason,
            "steps": status.num_steps,
            "episodes": status.num_episodes,
            "elapsed_seconds": int(status.elapsed_seconds),
        }
        if news != self._told:
            self._told = news
            try:
                self._pipe.send_bytes(json.dumps(news).encode())
            except BrokenPipeError:
                log.warning("the trainer is gone")

    # --- control ----------------------------------------------------------------------------------------------------

    async def _serve_control(self) -> None:
        while True:
            for identity, *frames in await self._control.burst(1.0):
                try:
                    role = identity.role if isinstance(identity, Peer) else ""
                    if peek_kind(frames) == MessageKind.EVALUATION:
                        _require_role(role, "evaluator")
                        self._note(*self._codec.decode_evaluation(frames, self._num_parameters))
                        continue
                    message = decode_request(frames, self._desk.run_id)
                    if message["type"] in ("hello", "heartbeat"):
                        _require_role(role, message.get("role"))
                    answer = self._answer(message)
                except WireError as error:
                    self._control.refuse(error)
                    continue
                except (KeyError, TypeError, ValueError) as error:
                    self._control.refuse(WireError("fields", repr(error)))
                    continue
                if message["type"] == "heartbeat":
                    self._ways[int(message["session"])] = bytes(identity)
                elif message["type"] == "status" and bytes(identity) not in self._observers:
                    self._observers.append(bytes(identity))
                if answer is not None:
                    self._control.reply(identity, encode_control(answer, self._desk.run_id))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        now = time.monotonic()
        if message["type"] == "status":
            return {"type": "status", **self._status.report(self._metrics.latest)}
        session = int(message["session"])
        if message["type"] == "goodbye":
            self._leases.release(session)
            self._status.forget(session)
            return None
        if message["type"] == "hello":
            if message.get("wire") != WIRE_VERSION:
                return {"type": "refused", "reason": f"wire version {message.get('wire')}, but this is {WIRE_VERSION}"}
            if self._status.finished:
                return END
            if message["role"] == "replay":
                shard, num_shards = int(message["shard"]), self._config.replay.num_shards
                if not 0 <= shard < num_shards:
                    reason = f"--shard {shard}: this run has replay.num_shards {num_shards}, 0 ... {num_shards - 1}"
                    return {"type": "refused", "reason": reason}
                if (answer := self._turn_away(shard, session, now)) is not None:
                    return answer
            streams = self._leases.claim(session, int(message["num_streams"]), now)
            return self._welcome(streams)
        if message["type"] == "heartbeat":
            if message["run_id"] != self._desk.run_id:
                return {"type": "refused", "reason": "this is another run"}
            streams = [Stream(int(actor_id), int(incarnation)) for actor_id, incarnation in message["streams"]]
            if not self._leases.renew(session, streams, now):
                return {"type": "refused", "reason": "its actor ids were leased to another"}
            self._hear(session, message, dict(message["status"]))
            state = {"type": "state", "stop": self._status.finished}
            if message["role"] == "replay":
                state["inserts_wanted"] = self._status.inserts_wanted(int(message["shard"]))
            return state
        raise WireError("type", str(message["type"])[:40])

    def _turn_away(self, shard: int, session: int, now: float) -> dict[str, Any] | None:
        """What a replay server that says hello is told if another one holds its shard; None if nobody does.

        The server before may have been killed a moment ago. Who is heard again after the newcomer has asked is alive;
        who is silent for two heartbeats is not. In between the newcomer waits, and asks again.
        """
        holder = self._status.replay_server(shard)
        silence = 2 * self._config.transport.heartbeat_seconds
        if holder is None or holder[0] == session or now - holder[1].seen_at > silence:
            self._asked.pop(session, None)
            return None
        member = holder[1]
        if len(self._asked) > MAX_ASKING:
            self._asked.clear()  # Whoever means it asks again.
        if member.seen_at <= self._asked.setdefault(session, now):
            return {"type": "wait", "holder": holder[0], "host": member.host, "run_id": self._desk.run_id}
        name = self._config.replay.shard_name(shard)
        where = f"process {member.pid} on {member.host}"
        return {"type": "refused", "reason": f"{name} is there already: {where}; stop it, or name another --shard"}

    def _hear(self, session: int, message: dict[str, Any], status: dict[str, Any]) -> None:
        is_replay = message["role"] == "replay"
        shard = int(message["shard"]) if is_replay else 0
        if not 0 <= shard < self._config.replay.num_shards:
            raise WireError("shard", f"shard {shard}")
        self._status.hear(session, str(message["role"]), str(message["host"]), int(message["pid"]), status, shard)
        self._status.num_leased = self._leases.num_leased
        if is_replay and message.get("endpoints"):
            self._status.replay_endpoints[shard] = {str(k): str(v) for k, v in message["endpoints"].items()}

    def _welcome(self, streams: list[Stream]) -> dict[str, Any]:
        return {
            "type": "welcome",
            "run_id": self._desk.run_id,
            "config": to_dict(self._config),
            "schema": self._desk.schema.to_dict(),
            "num_parameters": self._num_parameters,
            "num_actors": self._desk.num_actors,
            "memory": memory_id(),
            "replay": self._status.all_replay_endpoints,
            "absent": self._status.absent_replay,
            "streams": streams,
        }

    # --- curves -----------------------------------------------------------------------------------------------------

    async def _serve_metrics(self) -> None:
        while True:
            for frames in await self._figures.burst(1.0):
                try:
                    message = self._codec.decode_metrics(frames)
                except WireError as error:
                    self._figures.refuse(error)
                    continue
                scalars = {tag: x for tag, x in message["scalars"].items() if tag in self._tags}
                row = MetricRow(role="actor", steps=self._status.num_steps, time=message["time"], scalars=scalars)
                self._status.count_episodes(row)
                if self._begin_curves():
                    self._metrics.accept(row)

    def _begin_curves(self) -> bool:
        """Whether the curves may go on. What they have of steps that a resumed run makes again is cut off first.

        How many steps there are is known when every replay server has said what it holds.
        """
        if not self._curves_began and (self._status.num_steps == 0 or self._status.all_replay_endpoints):
            self._curves_began = True
            self._metrics.begin(self._status.num_steps)
            cut_curves(self._folder.curves, self._status.num_steps)
        return self._curves_began

    def _write_row(self) -> None:
        if not self._begin_curves():
            return
        try:
            for row in self._rows.next():
                self._metrics.accept(row, bounded=row["role"] == "replay")  # Its tags are what replay servers say.
        except ValueError as error:
            self._control.refuse(WireError("fields", str(error)))
        self._metrics.flush()

    def _note(self, result: dict[str, Any], parameters: Parameters | None) -> None:
        """Keeps an evaluation, and its parameters when they are the best so far.

        The first confirmed score ends the run at once, and is its last: the evaluator plays on until it is told, and
        what comes with it or right after it must not take its place.
        """
        if self._status.reason and self._status.evaluation.get("confirmed"):
            return
        best = self._best_policy.keep(result["mean"], parameters, games_of(result))
        self._status.evaluation = {**result, "best": best}
        self._status.reason = self._status.reason or self._status.end_reason()
        if self._begin_curves():
            self._metrics.accept(evaluation_row(self._status.num_steps, result, best))


def _require_role(role: str, claimed: object) -> None:
    """Refuses who speaks as another role than that of its key; `role` is "" without keys."""
    if role and role != claimed:
        raise WireError("role", f"a key of the role {role} speaks as {str(claimed)[:40]}")
