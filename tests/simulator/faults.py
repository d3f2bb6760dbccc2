"""The faults of simulated histories."""

from itertools import pairwise

import numpy as np
from support.store_builders import STEPS

SNAPSHOT_STEPS = ["copy", "check", "copy weights", "write a file", "write the manifest", "rename the manifest"]


def kill_a_server(world, server):
    server.end("a server was killed")


def crash_during_an_insert(world, server):
    server.crash_at = world.rng.choice(STEPS)


def lose_a_memory(world, server):
    server.end("a server was killed")
    server.path.unlink(missing_ok=True)


def remove_a_memory_in_use(world, server):
    server.path.unlink(missing_ok=True)


def flip_a_bit(world, server):
    server.end("a server was killed")
    if not server.path.exists():  # It was removed a moment ago.
        return
    data = np.memmap(server.path, np.uint8, "r+")
    offsets = server.settings.sizes.offsets(server.table)
    begin, end = world.rng.choice(list(pairwise(offsets)))
    offset = begin + int((end - begin) * world.rng.random() ** 4)  # Regions are filled from their beginning.
    data[offset] ^= 1 << world.rng.randrange(8)
    server.flipped = True
    world.damaged.add(server.incarnation)
    world.note(f"byte {offset} of {server.name} has a flipped bit")


def take_a_snapshot(world, server):
    server.take_snapshot()


def crash_during_a_snapshot(world, server):
    server.snapshot_crash_at = world.rng.choice(SNAPSHOT_STEPS)
    server.take_snapshot()


def fill_a_disk(world, server):
    server.disk_is_full = True
    server.take_snapshot()


def fill_tmpfs(world, server):
    lose_a_memory(world, server)
    world.full_until = world.clock.now + world.rng.uniform(0, 10)


def stop_the_server_in_order(world, server):
    world.head.end("a server was stopped", in_order=True)


def kill_a_sampler(world, server):
    if world.samplers:
        world.rng.choice(world.samplers).end("a sampler was killed")


def start_a_second_server(world, server):
    other = world.servers[f"b{world.rng.randrange(world.num_shards)}"]
    if not other.alive:
        other.back_at = world.clock.now
    if world.rng.random() < 0.7:  # Usually because the first server seems to be gone.
        cut(world, f"a{other.shard}", ["learner"])


def kill_a_host(world, server):
    world.rng.choice(world.hosts).end("a host was killed")


def end_a_host(world, server):
    host = world.rng.choice(world.hosts)
    if host.joined:
        host.leave("a host left")


def restart_the_learner(world, server):
    world.wall += world.rng.choice([0, 0, 86_400, -86_400])
    world.head.kill()


def stop_a_program(world, server):
    program = world.rng.choice(world.programs)
    program.stopped_until = world.clock.now + world.rng.choice([1, 5, 30])


def cut_the_network(world, server):
    names = [program.name for program in world.programs]
    one = world.rng.choice(names)
    cut(world, one, world.rng.choice([names, [world.rng.choice(names)]]))


def cut(world, one, others):
    seconds = world.rng.choice([2, 8, 20, 60])
    world.note(f"{one} is cut off from {', '.join(others)} for {seconds} s")
    for other in others:
        world.network.cut(one, other, seconds)


OF_A_SERVER = (
    kill_a_server, crash_during_an_insert, lose_a_memory, remove_a_memory_in_use, flip_a_bit, take_a_snapshot,
    crash_during_a_snapshot, fill_a_disk, fill_tmpfs,
)  # fmt: skip
FAULTS = {  # how often, relative to the others
    kill_a_server: 2, crash_during_an_insert: 5, lose_a_memory: 2, remove_a_memory_in_use: 1, flip_a_bit: 2,
    take_a_snapshot: 10, crash_during_a_snapshot: 2, fill_a_disk: 1, fill_tmpfs: 1,
    kill_a_host: 2, end_a_host: 1, stop_a_program: 2, cut_the_network: 3,
}  # fmt: skip
FAULTS_OF_A_RUN = {start_a_second_server: 1, restart_the_learner: 2}
FAULTS_OF_TABLES = {stop_the_server_in_order: 2, kill_a_sampler: 1}
