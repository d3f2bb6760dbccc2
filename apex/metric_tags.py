"""Names of metrics of games and replay servers: the coordinator writes them, and reports read them."""

SCORE, LENGTH = "actor_highest_id/score", "actor_highest_id/length"  # tags of the actor with the smallest epsilon
MEAN_SCORE, EPISODES, FAULTS = "actors/mean_score", "actors/episodes", "actors/environment_faults"
ACTOR_METRIC, EVALUATOR_METRIC = "actor_metrics/", "evaluator_metrics/"  # prefixes of what environments report
SUCCESS = "success"  # name of the metric that `info["is_success"]` is
MAX_CURVES = 64  # maximum actors with a curve of their own
MAX_METRICS = 16  # maximum metrics of a run; others are ignored


def shard_tag(name: str, shard: int) -> str:
    """Returns the TensorBoard tag of a figure of one of several replay servers."""
    return f"replay/{name}/shard-{shard}"


def has_curve(actor_id: int, num_actors: int) -> bool:
    """Returns whether an actor has a curve of its own: all have, or evenly spaced ones with the lowest and highest."""
    if num_actors <= MAX_CURVES:
        return True
    number = -(-actor_id * (MAX_CURVES - 1) // (num_actors - 1))
    return number * (num_actors - 1) // (MAX_CURVES - 1) == actor_id


def score_tag(actor_id: int, amount: float, name: str) -> str:
    """Returns the TensorBoard tag of an actor's curve; `name`, `amount`: the actor's exploration, as in epsilon 0.1."""
    return f"actors/score_{actor_id:04d}_{name}_{amount:.5f}"
