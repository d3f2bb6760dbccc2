"""Opens the memory of a replay server with the settings of a welcome, as a server does."""

from apex.replay_memory.settings import counter_rows, store_settings
from apexreplay.server.open_store import open_store


def open_memory(path, welcome, snapshots=None):
    config = welcome.config
    settings, rows = store_settings(config.replay, config.actor.num_actors), counter_rows(config.replay, config.learner)
    return open_store(path, welcome.schema.table, settings, rows, run_id=welcome.run_id, snapshots=snapshots)
