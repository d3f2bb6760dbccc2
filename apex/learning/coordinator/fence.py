"""Which replay server holds each shard. A file in the run folder keeps this while the learner is not running."""

import logging
from pathlib import Path

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from apex.transport.messages.control import Hello, ReplayHeartbeat
from apexreplay.files.atomic_files import replace_file, seal, unseal

FILE = "fence.json"
NUMBERS_PER_START = 2**20  # range of fencing numbers for each second in which a learner may start

log = logging.getLogger("apex")


class Holder(Struct, frozen=True, kw_only=True):
    """The replay server that holds a shard."""

    number: int  # fencing number of its welcome: the server with the highest number holds the shard
    session: int  # -1: it has left the run
    host: str
    store_incarnation: str = ""  # "": its first heartbeat has not arrived


class Fence:
    """Gives each replay server a higher number than its predecessors, and refuses those with a lower number.

    A server that was replaced lacks what its successor has acknowledged. It must stay refused, also after the learner
    was started again, and also if the file was lost: the number is in each heartbeat.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        """`epoch`: number of this start of the learner; higher than that of earlier starts."""
        self._path = folder / FILE
        self._first, self._end = epoch * NUMBERS_PER_START, (epoch + 1) * NUMBERS_PER_START
        self._holders: dict[int, Holder] = {}
        try:
            self._holders = convert(unseal(self._path.read_bytes())["holders"], dict[int, Holder], strict=False)
        except FileNotFoundError:
            pass
        except (OSError, KeyError, TypeError, ValueError) as error:
            log.error("%s cannot be read (%s); the highest number in a heartbeat decides", self._path, error)

    def find(self, shard: int) -> Holder | None:
        """Returns the holder of a shard, perhaps that of an earlier start of the learner; None if it has left."""
        holder = self._holders.get(shard)
        return None if holder is None or holder.session < 0 else holder

    def grant(self, hello: Hello) -> int:
        """Makes the sender the holder of its shard; returns its number."""
        held = self._holders.get(hello.shard)
        if held is None or held.session != hello.session:
            number = self._first if held is None else max(self._first, held.number + 1)
            self._keep(hello.shard, Holder(number=number, session=hello.session, host=hello.host))
        return self._holders[hello.shard].number

    def release(self, session: int) -> bool:
        """Frees the shard of a server that leaves the run or is dead; returns whether it held one."""
        for shard, held in self._holders.items():
            if held.session == session:
                self._keep(shard, replace(held, session=-1))
                return True
        return False

    def refuses(self, beat: ReplayHeartbeat) -> bool:
        """Returns whether another server holds the sender's shard, as can happen after a network failure."""
        held = self._holders.get(beat.shard)
        number, session = (-1, -1) if held is None else (held.number, held.session)
        return (beat.fence, beat.session) != (number, session) and not number < beat.fence < self._end

    def note(self, beat: ReplayHeartbeat) -> None:
        """Notes the sender of a heartbeat that was not refused as the holder of its shard."""
        incarnation = beat.status.store_incarnation
        holder = Holder(number=beat.fence, session=beat.session, host=beat.host, store_incarnation=incarnation)
        if holder != self._holders.get(beat.shard):
            self._keep(beat.shard, holder)

    def _keep(self, shard: int, holder: Holder) -> None:
        self._holders[shard] = holder
        try:
            replace_file(self._path, seal({"holders": to_builtins(self._holders, str_keys=True)}))
        except OSError as error:  # A full disk must not end the run.
            log.error("%s cannot be written: %s; keep the learner running until it can", self._path, error)
