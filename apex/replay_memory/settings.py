"""The settings of a shard, as the replay library needs them."""

from apex.config import Config, LearnerConfig, ReplayConfig
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import DrawSettings
from apexreplay.store.layout import StoreSettings


def store_settings(replay: ReplayConfig, num_streams: int) -> StoreSettings:
    """Returns the settings of one shard's store. They are the same for all shards."""
    own = replay.per_shard()
    return StoreSettings(own.capacity, own.max_bytes, num_streams, own.priority_exponent, own.min_priority)


def counter_rows(replay: ReplayConfig, learner: LearnerConfig) -> int:
    """Returns the number of rows: one per sampler process, then one per loader."""
    return replay.num_samplers + max(1, learner.num_loaders)


def draw_settings(replay: ReplayConfig, shard: int, batch_size: int) -> DrawSettings:
    """Returns the settings of one shard. A batch of `batch_size` transitions has one part from each shard.

    Each shard applies the replay ratio to its own inserts and samples.
    """
    own = replay.per_shard()
    tolerance = own.samples_per_insert_tolerance
    limiter = RateLimiter(own.min_size_to_sample, own.samples_per_insert, tolerance, own.inserts_wait)
    part_size = batch_size // replay.num_shards
    return DrawSettings(shard, replay.num_shards, part_size, replay.batches_in_flight, limiter)


def batch_endpoints(config: Config, shard: int, host: str | None = None) -> list[str]:
    """Returns the address of each sampler process of a shard on `host`; without `host`, the address to bind to."""
    shards, samplers = config.replay.num_shards, range(config.replay.num_samplers)
    return [config.transport.endpoint("batches", host, shard + shards * sampler) for sampler in samplers]
