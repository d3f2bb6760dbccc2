"""Planted faults: each breaks one rule of the protocol, which the simulator must notice."""

import numpy as np

from apex.learning.coordinator.fence import Fence
from apex.runs.folder import RunFolder
from apexreplay.client.sampler import Sampler
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.client.send_window import SendWindow
from apexreplay.files.atomic_files import digest
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.selection import Selection
from apexreplay.server import standalone
from apexreplay.server.leases import FREE, LeaseTable
from apexreplay.server.server import ReplayServer
from apexreplay.snapshots.folder import SnapshotFile, SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store import writer
from apexreplay.store.deduplication import InsertOutcome, StreamRow
from apexreplay.store.layout import FIRST_BYTE, FIRST_KEY
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import RECEIPT_ROW, Receipts

from .replay_program import ReplayProcess


def duplicates_are_stored(patch):
    judge = StreamRow.judge

    def blind(self, segment, commit, **options):
        outcome, row = judge(self, segment, commit, **options)
        if outcome is InsertOutcome.DUPLICATE:
            return InsertOutcome.STORED, row._replace(commit=commit)
        return outcome, row

    patch.setattr(StreamRow, "judge", blind)


def receipts_precede_the_commit(patch):
    insert = ReplayServer.insert

    def early(self, messages):
        """Stores the messages of the previous call, and acknowledges those of this one."""
        waiting, self.waiting = getattr(self, "waiting", []), messages
        receipts = []
        for frames in messages:
            segment = self._codec.decode_segment(frames, self.shard)
            actor_id = segment.stream.actor_id
            _, row = self._store._row(actor_id).judge(segment, 0)
            rows = np.array([(actor_id, row.incarnation, row.contiguous, row.bitmap)], RECEIPT_ROW)
            receipts.append(Receipts(segment.group, self._store.store_incarnation, rows))
        insert(self, waiting)
        return receipts

    patch.setattr(ReplayServer, "insert", early)


def windows_are_not_sent_to_a_new_store(patch):
    acknowledge = SendWindow.acknowledge
    patch.setattr(SendWindow, "acknowledge", lambda self, receipt, now: acknowledge(self, receipt, now) and False)


def replaced_servers_are_accepted(patch):
    patch.setattr(Fence, "refuses", lambda self, heartbeat: False)


def fence_is_not_written(patch):
    patch.setattr(Fence, "_keep", lambda self, shard, holder: self._holders.update({shard: holder}))


def damage_is_not_looked_for(patch):
    patch.setattr(writer, "require_sound", lambda *arguments: None)


def leases_are_given_twice(patch):
    claim = LeaseTable.claim

    def forgetful(self, session, count, now):
        self._holders[self._holders != session] = FREE
        return claim(self, session, count, now)

    patch.setattr(LeaseTable, "claim", forgetful)


def epochs_repeat(patch):
    patch.setattr(RunFolder, "next_epoch", lambda self, clock: 1)


def the_watermark_moves_late(patch):
    before = ReplayProcess.before_insert
    place = [FIRST_KEY, FIRST_BYTE]

    def late(self, step):
        cells = self.store._cells
        if step == "watermark":
            self.marks = cells[place].copy()
        elif step == "evict":
            cells[place], self.marks = self.marks, cells[place].copy()
        elif step == "leaves":
            cells[place] = self.marks
        before(self, step)

    patch.setattr(ReplayProcess, "before_insert", late)


def leaves_precede_the_commit(patch):
    before = ReplayProcess.before_insert

    def early(self, step):
        if step == "commit":
            regions, first = self.store._regions, self.store.num_inserted
            slots = np.arange(first, regions.streams["commit"].max()) % self.store.capacity
            regions.tree.set(slots, np.ones(len(slots)))
        before(self, step)

    patch.setattr(ReplayProcess, "before_insert", early)


def manifests_precede_their_files(patch):
    write, commit = SnapshotFolder.write, SnapshotFolder.commit

    def wait(self, name, parts, keys):
        self.waiting = [*getattr(self, "waiting", []), (name, parts, keys)]
        return SnapshotFile(name, sum(map(len, parts)), digest(*parts), keys.start, keys.stop)

    def early(self, snapshot):
        waiting, self.waiting = getattr(self, "waiting", []), []
        commit(self, snapshot)
        for file in waiting:
            write(self, *file)

    patch.setattr(SnapshotFolder, "write", wait)
    patch.setattr(SnapshotFolder, "commit", early)


def rows_of_interrupted_inserts_become_valid(patch):
    repair = StoreWriter._repair

    def careless(self):
        regions, rows = self._regions, self._regions.streams.copy()
        repair(self)
        regions.streams[:], regions.row_checksums[:] = rows, regions.checksum_rows(rows)

    patch.setattr(StoreWriter, "_repair", careless)


# --- a server of tables -----------------------------------------------------------------------------------------------


def incarnations_of_a_restarted_server_repeat(patch):
    open_folder = standalone._open_folder
    patch.setattr(standalone, "_open_folder", lambda *arguments: (1, open_folder(*arguments)[1]))


def samplers_keep_an_old_memory(patch):
    patch.setattr(Sampler, "_follow", lambda self: None)


def priorities_of_an_earlier_store_are_applied(patch):
    update = StoreWriter.update_priorities

    def careless(self, wanted):
        return update(self, wanted._replace(store_incarnation=self.store_incarnation))

    patch.setattr(StoreWriter, "update_priorities", careless)


def snapshots_forget_priorities(patch):
    weigh = SnapshotWriter._weights

    def equal(self, end_key):
        first_key, weights = weigh(self, end_key)
        return first_key, np.full_like(weights, 0.77)

    patch.setattr(SnapshotWriter, "_weights", equal)


def draws_have_no_limit(patch):
    patch.setattr(RateLimiter, "may_sample", lambda self, inserted, drawn: inserted >= self.min_size_to_sample)


def inserts_do_not_wait(patch):
    patch.setattr(RateLimiter, "may_insert", lambda self, inserted, drawn: True)


def stacks_reach_into_the_previous_episode(patch):
    patch.setattr(SegmentBuffer, "end_episode", lambda self: None)


def queues_begin_again_with_each_server(patch):
    position = Selection.position
    patch.setattr(Selection, "position", lambda self, first_key, num_drawn: position(self, first_key, 0))


def queues_leave_out_items(patch):
    can_be_drawn = StoreReader.can_be_drawn
    patch.setattr(StoreReader, "can_be_drawn", lambda self, keys: can_be_drawn(self, keys) & (keys % 50 != 7))


def inserts_remove_what_a_queue_has_not_given(patch):
    patch.setattr(ReplayServer, "_would_remove_undrawn", lambda self: False)


PLANTS = [
    fence_is_not_written, damage_is_not_looked_for,
    duplicates_are_stored, receipts_precede_the_commit, windows_are_not_sent_to_a_new_store,
    replaced_servers_are_accepted, leases_are_given_twice, epochs_repeat, the_watermark_moves_late,
    leaves_precede_the_commit, manifests_precede_their_files, rows_of_interrupted_inserts_become_valid,
    incarnations_of_a_restarted_server_repeat, samplers_keep_an_old_memory,
    priorities_of_an_earlier_store_are_applied, snapshots_forget_priorities,
    draws_have_no_limit, inserts_do_not_wait, stacks_reach_into_the_previous_episode,
    queues_begin_again_with_each_server, queues_leave_out_items, inserts_remove_what_a_queue_has_not_given,
]  # fmt: skip
