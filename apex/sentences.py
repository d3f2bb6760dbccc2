"""Turns facts into English. Each sentence has one place, and tests/golden/sentences.txt holds all of them."""

from __future__ import annotations

from apex.facts import EndReason, Phase


def plural(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 seed", "1,200 seeds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


PHASES: dict[Phase, str] = {
    "waiting_for_replay": "waiting for replay",
    "filling_replay": "filling replay",
    "training": "training",
    "finishing": "finishing",
    "evaluating_final_policy": "evaluating the final policy",
    "finished": "finished",
}


def describe_end(end: EndReason) -> str:
    """Returns why a run ended, as a phrase without a subject."""
    match end.kind:
        case "score":
            return f"reached the score {end.value:g}"
        case "steps":
            return f"reached {end.value:.0f} steps"
        case "updates":
            return f"reached {end.value:.0f} updates"
        case "minutes":
            return f"reached {end.value:g} min"
        case "interrupted":
            return "interrupted"


def describe_outcome(end: EndReason | None, *, running: bool) -> str:
    """Returns how a run ended according to its folder."""
    if running:
        return "the run has not ended"
    if end is not None:
        return describe_end(end)
    return "no end is recorded: the learner was killed or failed, or an older version made the run; see the run's logs"
