"""Builds the status of a run that `apex status` and the live view show."""

from collections.abc import Callable

from msgspec.structs import replace

from apex.learning.coordinator.members import add_counts
from apex.learning.coordinator.state import RunState
from apex.metric_tags import EPISODES, MEAN_SCORE, SCORE
from apex.transport.messages.run_status import ActorSummary, EvaluatorSummary, Limits, ReplaySummary, RunStatus
from apex.transport.messages.status import LearnerStatus

REPLAY_FIGURES = (
    *("size", "bytes", "max_bytes", "inserts_per_second", "samples_per_second", "samples_per_insert"),
    *("stale_priorities", "busy_share"),
)

Latest = Callable[[str], float | None]  # returns the newest value of a metric, by its tag


def summarize(state: RunState, latest: Latest) -> RunStatus:
    """Returns the present status of the run."""
    run, actor, replay_settings = state.config.run, state.config.actor, state.config.replay
    replay, rows = state.members.replay, state.members.rows()
    learner = replace(state.learner or LearnerStatus(), resources=state.learner_resources)
    highest, evaluation = actor.num_actors - 1, state.evaluation
    return RunStatus(
        run=state.name,
        folder=state.folder,
        environment=state.config.environment.id,
        elapsed_seconds=state.elapsed_seconds,
        untrained_seconds=state.untrained_seconds,
        phase=state.phase,
        end=state.end,
        steps=state.num_steps,
        steps_per_second=replay.inserted_steps_per_second if replay else None,
        updates=learner.updates,
        updates_per_second=learner.updates_per_second,
        samples_per_second=learner.samples_per_second,
        policy_lag=learner.policy_lag,
        replay=ReplaySummary(
            capacity=replay_settings.capacity,
            min_size=replay_settings.min_size_to_sample,
            **{name: getattr(replay, name, None) for name in REPLAY_FIGURES},
        ),
        actors=ActorSummary(
            configured=actor.num_actors,
            leased=state.num_leased,
            highest_id=highest,
            exploration=state.exploration.name,
            highest_exploration=float(state.exploration.amounts[highest]),
            score=latest(SCORE),
            mean_score=latest(MEAN_SCORE),
            episodes=latest(EPISODES),
            faults=state.num_faults,
            **state.actor_figures(),
        ),
        learner=learner,
        evaluator=EvaluatorSummary(
            score=evaluation.mean if evaluation else None,
            best=state.best_score,
            episodes=evaluation.episodes if evaluation else None,
            updates=evaluation.updates if evaluation else None,
        ),
        limits=Limits(steps=run.max_steps, updates=run.max_updates, minutes=run.max_minutes, score=run.stop_score),
        limited_by=state.bottleneck(),
        refused_connections=add_counts([state.refused_connections, replay.refused_connections if replay else {}]),
        refusals={
            "replay": replay.refusals if replay else {},
            "batches": {"refused": learner.refused_batches},
            **state.refusals,
        },
        roles=rows,
        more_roles=len(state.members) - len(rows),
        evaluations=list(state.evaluations),
    )
