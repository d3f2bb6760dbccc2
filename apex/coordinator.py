"""The learner's front desk: hello, leases, heartbeats, metrics and the end of the run, in a process of its own.

It is a child of the learner, so that a long gradient step keeps nobody waiting. The two talk by a pipe: the trainer
reports once a second, the coordinator says where replay is and when to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from apex.checkpoint import BEST, CheckpointError, PolicyInfo, load_policy, save_policy
from apex.config import Config, to_dict
from apex.header import MAX_JSON_BYTES, VERSION, Kind, WireError, peek_kind
from apex.leases import LeaseTable
from apex.lifecycle import Stop
from apex.metrics import MetricsWriter
from apex.priority_histogram import merge
from apex.run_folder import RunFolder
from apex.run_status import RunStatus
from apex.store_layout import memory_id
from apex.transport import PULL, ROUTER, AsyncReceiver, open_context
from apex.types import Schema, Stream
from apex.wire import Codec, decode_control, encode_control

log = logging.getLogger("apex")

METRICS_PERIOD = 1.0  # seconds between two rows of curves
FAREWELL_SECONDS = 3.0  # how long the end of the run is told to whoever still asks
FORGET_SECONDS = 30.0  # a program that is silent for so long is shown no more


class Desk(NamedTuple):
    """What the coordinator is told at its start."""

    config: Config
    schema: Schema
    run_id: int
    num_actors: int
    epoch: int  # how often the learner of this run has started
    folder: Path


def coordinate(stop: Stop, desk: Desk, pipe: Connection, trainer_end: Connection) -> None:
    """The child's main function: returns when the trainer has finished or has closed its end of the pipe."""
    trainer_end.close()  # The child's copy of it, which would keep the pipe open for ever.
    asyncio.run(Coordinator(desk, pipe, stop).run())


class Coordinator:
    """Answers programs, keeps curves, and knows when the run is over."""

    def __init__(self, desk: Desk, pipe: Connection, stop: Stop) -> None:
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
        self._status.evaluation = self._best_before()
        self._num_parameters = 0  # unknown until the trainer has built its network; nobody is welcome before
        self._told: dict[str, Any] = {}
        self._asked: dict[int, float] = {}  # when a replay server first asked for a shard that another one may hold
        self._histograms: list[Any] = []  # the last ones that were written, of each shard

    async def run(self) -> None:
        """Serves until the trainer is done, then tells everybody for a moment."""
        transport = self._config.transport
        with open_context() as context:
            while not self._num_parameters:  # The most that a message may take depends on it.
                await asyncio.sleep(0.01)
                if self._stop.requested or not self._hear_trainer():
                    return
            self._control = AsyncReceiver(
                context,
                ROUTER,
                transport.endpoint("control"),
                high_water_mark=1_000,
                max_bytes=2 * MAX_JSON_BYTES + 4 * self._num_parameters,
            )
            self._figures = AsyncReceiver(
                context,
                PULL,
                transport.endpoint("metrics"),
                high_water_mark=10_000,
                max_bytes=MAX_JSON_BYTES,
            )
            tasks = [asyncio.create_task(work) for work in (self._serve_control(), self._serve_metrics())]
            try:
                await self._watch(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # They wait on sockets that close now.
                self._metrics.close()

    async def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        row_at, farewell_at = time.monotonic(), 0.0
        while not self._stop.requested:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()  # Raises what ended it.
            if not self._hear_trainer():
                return
            if time.monotonic() >= row_at:
                row_at += METRICS_PERIOD
                self._write_row()
                self._folder.elapsed_seconds = self._status.elapsed_seconds
                self._status.forget_silent(FORGET_SECONDS)
                self._leases.expire(time.monotonic())
            if not self._status.reason:
                self._status.reason = self._status.end_reason()
            self._tell_trainer()
            if self._status.finished:
                if not farewell_at:
                    self._write_row()  # The curves end with the last update.
                farewell_at = farewell_at or time.monotonic() + FAREWELL_SECONDS
                if not self._status.members or time.monotonic() >= farewell_at:
                    return

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _hear_trainer(self) -> bool:
        """Takes the trainer's reports; False when it is gone."""
        try:
            while self._pipe.poll():
                report = json.loads(self._pipe.recv_bytes())
                self._num_parameters = report.pop("num_parameters", self._num_parameters)
                self._status.num_steps = max(self._status.num_steps, report.pop("num_steps", 0))
                if "finished" in report:
                    self._status.reason = self._status.reason or report.pop("finished")
                    self._status.finished = True
                self._status.learner.update(report)
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
                    if peek_kind(frames) == Kind.EVALUATION:
                        self._keep(*self._codec.decode_evaluation(frames, self._num_parameters))
                        continue
                    answer = self._answer(decode_control(frames))
                except WireError as error:
                    self._control.refuse(error)
                    continue
                except (KeyError, TypeError, ValueError) as error:
                    self._control.refuse(WireError("fields", repr(error)))
                    continue
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
            if message.get("wire") != VERSION:
                return {"type": "refused", "reason": f"wire version {message.get('wire')}, but this is {VERSION}"}
            if self._status.finished:
                return {"type": "state", "stop": True}
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
                    message["steps"] = self._status.num_steps
                    self._metrics.accept(message)
                except WireError as error:
                    self._figures.refuse(error)
                except ValueError as error:
                    self._figures.refuse(WireError("fields", str(error)))

    def _write_row(self) -> None:
        steps, now = self._status.num_steps, time.time()
        learner = {f"learner/{name}": value for name, value in self._status.learner.items() if _is_number(value)}
        if learner:
            scalars = learner | self._status.scalars()
            self._metrics.accept({"role": "learner", "steps": steps, "time": now, "scalars": scalars})
        replay = self._status.replay_status()
        figures = {f"replay/{name}": value for name, value in replay.items() if _is_number(value)}
        if figures:
            row: dict[str, Any] = {"role": "replay", "steps": steps, "time": now, "scalars": figures}
            histograms = replay["priority_histograms"]
            try:
                if histograms and histograms != self._histograms:  # They come with each heartbeat, and are seldom new.
                    self._histograms = histograms
                    row["histograms"] = {"replay/priority": merge(histograms)}
                self._metrics.accept(row)
            except ValueError as error:
                self._control.refuse(WireError("fields", str(error)))
        self._metrics.flush()

    def _best_before(self) -> dict[str, Any]:
        """The best score of this run's earlier lives, whose policy only a better one may replace."""
        path = self._folder.checkpoints / BEST
        try:
            score = load_policy(path)[0].score if path.exists() else None
        except CheckpointError as error:
            log.error("%s; the next evaluation's policy takes its place", error)
            return {}
        return {} if score is None else {"best": score}

    def _keep(self, result: dict[str, Any], parameters: Any) -> None:
        """Notes an evaluation, and keeps its parameters when they are the best so far."""
        best = self._status.evaluation.get("best")
        if best is None or result["mean"] >= best:
            best = result["mean"]
        self._status.evaluation = {**result, "best": best}
        names = {"evaluator/score": "mean", "evaluator/score_median": "median", "evaluator/length": "length"}
        scalars = {tag: result[name] for tag, name in names.items()}
        message = {"role": "evaluator", "steps": self._status.num_steps, "time": time.time(), "scalars": scalars}
        self._metrics.accept(message)
        if parameters is not None and result["mean"] >= best:
            info = PolicyInfo(
                schema=self._desk.schema,
                network=self._config.network,
                environment=self._config.environment,
                num_updates=parameters.version,
                score=float(result["mean"]),
            )
            try:
                save_policy(self._folder.checkpoints / BEST, parameters.values, info)
            except OSError as error:
                log.error("the best policy was not kept: %s", error)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
