"""Names of metrics that several layers use: actors send them, the learner checks them, and reports read them."""

from __future__ import annotations

from collections.abc import Collection

SCORE, LENGTH = "actor_highest_id/score", "actor_highest_id/length"  # tags of the actor with the smallest epsilon
MEAN_SCORE, EPISODES, FAULTS = "actors/mean_score", "actors/episodes", "actors/environment_faults"


def score_tag(actor_id: int, amount: float, name: str) -> str:
    """Returns the TensorBoard tag of an actor's curve; `name`, `amount`: the actor's exploration, as in epsilon 0.1."""
    return f"actors/score_{actor_id:04d}_{name}_{amount:.5f}"


def actor_tags(amounts: Collection[float], name: str = "epsilon") -> frozenset[str]:
    """Returns all tags that the actors of a run may send. `amounts`: the exploration of each actor, by actor id."""
    own = (score_tag(actor_id, amount, name) for actor_id, amount in enumerate(amounts))
    return frozenset((SCORE, LENGTH, MEAN_SCORE, EPISODES, FAULTS, *own))


ACTOR_TAG_PREFIXES = ("actors/", "actor_highest_id/")  # Tags of actors; the coordinator writes all other tags.
