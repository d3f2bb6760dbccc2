"""Facts about a run, as small immutable records: inside the programs, in messages and in files.

Nothing in a record is a sentence: a field is a number, an enumeration or an identifier. `apex.sentences` turns a record
into English where a person reads it.
"""

from typing import Literal

from apexreplay.facts import Number, Record, Text, Waiting

EndKind = Literal["score", "steps", "updates", "minutes", "callback", "interrupted", "failed"]
Phase = Literal["waiting_for_replay", "filling_replay", "training", "finishing", "evaluating_final_policy", "finished"]


Part = Literal["actors", "wire", "replay", "loaders", "learner", "processor"]
_AbsenceCause = Literal["no_actors", "replay_absent"]
_ActorCause = Literal["samples_wait_for_inserts", "repeated_draws"]
_LearnerCause = Literal["busy_learner", "busy_learner_delays_inserts", "too_many_actors", "silent_trainer"]
_BatchCause = Literal["busy_loaders", "busy_replay", "other_programs", "crowded_cores", "slow_receipts", "latency"]
Cause = Literal[_AbsenceCause, _ActorCause, _LearnerCause, _BatchCause]


class EndReason(Record, frozen=True):
    """Why a run ended: it reached a limit, or a callback or a user stopped it."""

    kind: EndKind
    value: Number | None = None  # the limit that was reached; None: there was none
    detail: Text = ""  # the reason that the callback gave

    @property
    def is_limit(self) -> bool:
        """Whether the run reached a limit, so that it would end at once if it was resumed."""
        return self.kind not in ("callback", "interrupted", "failed")


INTERRUPTED = EndReason("interrupted")

FailureKind = Literal["exit", "signal", "stuck", "refused", "error", "no_steps", "no_updates", "unsaved", "silent"]


class Failure(Record, frozen=True, kw_only=True):
    """Why a program, or the process that runs it, could not continue."""

    role: str
    kind: FailureKind
    # exit: the status; signal: its number; stuck: seconds without a heartbeat; no_updates: transitions that the first
    # update needs; unsaved: update of the newest checkpoint
    value: float = 0.0
    times: int = 1  # how often the program has ended
    detail: str = ""  # the last line of its log, the text of the exception, or silent: the address of the service
    log: str = ""  # path of its log
    unit: str = ""  # unit of Ray in which it ran; "": this host


class Ending(Record, frozen=True):
    """How the programs of a run ended."""

    status: int  # exit status of the run
    role: str = ""  # program that ended the run; "": a stop was requested
    failure: Failure | None = None  # None if `status` is 0


class ProgramEvent(Record, frozen=True):
    """What the supervisor does with a program."""

    role: str
    kind: Literal["restarting", "abandoned", "stopping", "killing", "saving"]
    # restarting: pause before the start; killing: time since it was asked to stop; saving: the longest further wait
    seconds: float = 0.0
    failure: Failure | None = None  # restarting, abandoned: why the program ended; its `value` may be status 0


UnitEventKind = Literal["placed", "lost", "waiting", "restarting", "abandoned", "learner"]


class UnitEvent(Record, frozen=True, kw_only=True):
    """What happens to a unit of a run on Ray: it is placed on a host, lost, waits for a node, restarts or is given up.

    "learner": the learner of the head has a new address.
    """

    unit: str
    kind: UnitEventKind
    host: str = ""  # placed: name of the host
    address: str = ""  # placed: address of the host; learner: HOST:PORT of its control socket
    tensorboard: str = ""  # learner: HOST:PORT of TensorBoard on that host; "": there is none
    cpus: int = 0  # waiting: CPUs that the unit needs
    memory: int = 0  # waiting: bytes of memory that the unit needs
    gpu: bool = False  # waiting: whether the unit needs a GPU
    free_cpus: float = 0.0  # waiting: CPUs of the cluster that are free
    total_cpus: float = 0.0  # waiting: CPUs of the cluster
    failure: Failure | None = None  # restarting, abandoned


class LogEntry(Record, frozen=True, kw_only=True):
    """A warning or an error that a program has logged."""

    time: float  # Unix seconds
    role: str  # the program that logged it
    level: str  # WARNING, ERROR or CRITICAL
    message: str
    waiting: Waiting | None = None  # the wait that the entry reports


class Bottleneck(Record, frozen=True, kw_only=True):
    """The part that limits the speed of training. None: the figure does not belong to `cause`."""

    part: Part
    cause: Cause
    subject: Text = ""  # replay servers that are absent
    share: Number | None = None  # share of time that the part is busy or waits
    learner_wait_share: Number | None = None  # share of time that the learner waits for batches
    have: Number | None = None  # the number that is there
    need: Number | None = None  # the number that is required
    increase: tuple[str, ...] = ()  # settings that remedy it if they are increased, such as "replay.num_shards"
    decrease: tuple[str, ...] = ()  # settings that remedy it if they are decreased


RestoreSource = Literal["checkpoint", "memory", "snapshot", "nothing"]
_MemoryLoss = Literal["memory_gone", "memory_damaged", "memory_incomplete", "memory_older"]
LossCause = Literal[_MemoryLoss, "snapshot_older", "snapshot_gone"]


class Restored(Record, frozen=True, kw_only=True):
    """From what a part of a resumed run starts. "memory" is a file that is still in tmpfs."""

    part: str  # "learner", "replay" or, with several shards, "replay 1"
    source: RestoreSource
    number: int = 0  # checkpoint: its update; snapshot: its number
    size: int = 0  # checkpoint: its steps; memory and snapshot: their transitions
    lost: int = 0  # learner: updates after the checkpoint; there may be more, of the last two seconds
    count: int = 0  # memory and snapshot: transitions stored until then, including overwritten ones
    causes: tuple[LossCause, ...] = ()  # why a part of the replay memory may lack transitions
    path: str = ""  # memory: its file; nothing: the folder in which a saved file is missing, "" if none was ever saved
    other_number: int = 0  # memory: a newer snapshot; else: the missing snapshot of the checkpoint; 0: none
    other_size: int = 0  # memory: the newer transitions of that snapshot; else: its transitions


class Missing(Record, frozen=True, kw_only=True):
    """Acknowledged transitions that a resumed run lacks. More may be missing: those of the last two seconds."""

    transitions: int  # how many of the transitions that the replay memory held when the run stopped
    of: int  # transitions that the replay memory held then
    causes: tuple[LossCause, ...]


class WarmStart(Record, frozen=True, kw_only=True):
    """The trained policy from which a new run starts, and which tensors of the network it has."""

    path: str
    updates: int  # updates with which the policy was trained
    copied: int  # number of tensors that were copied
    others: tuple[str, ...] = ()  # tensors of the network that the policy lacks or has in another shape


class OtherVersion(Record, frozen=True):
    """Another version of this package than the present one has started the run last: commits, or version numbers."""

    saved: str
    present: str
