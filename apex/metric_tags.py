"""Metric names that more than one layer knows: actors send them, the learner checks them, reports read them."""

from __future__ import annotations

from collections.abc import Collection

SCORE, LENGTH = "actor_highest_id/score", "actor_highest_id/length"  # of the actor with the smallest epsilon
MEAN_SCORE, EPISODES, FAULTS = "actors/mean_score", "actors/episodes", "actors/environment_faults"


def score_tag(actor_id: int, epsilon: float) -> str:
    """The TensorBoard tag of one actor's curve."""
    return f"actors/score_{actor_id:04d}_epsilon_{epsilon:.5f}"


def actor_tags(epsilons: Collection[float]) -> frozenset[str]:
    """All tags that the actors of a run may have; `epsilons` are theirs, by actor id."""
    own = (score_tag(actor_id, epsilon) for actor_id, epsilon in enumerate(epsilons))
    return frozenset((SCORE, LENGTH, MEAN_SCORE, EPISODES, FAULTS, *own))


ACTOR_TAG_PREFIXES = ("actors/", "actor_highest_id/")  # An actor's curves; the others' are the coordinator's own.
