"""How TensorBoard's page Custom Scalars arranges a run's curves: what matters first, and one screen of it."""

from __future__ import annotations

Layout = dict[str, dict[str, list[str]]]  # category -> title of a chart -> the tags in it, as regular expressions

GLANCE = "1. The run at a glance"
SCORES, LEARNER, REPLAY, TROUBLE = "2. Games", "3. Learner", "4. Replay memory", "5. Trouble: all of it should be 0"

# TensorBoard asks whether the beginning of a tag matches: a $ keeps evaluator/score from score_median.
LAYOUT: Layout = {
    GLANCE: {
        "Score of whole games: greedy, its best, and the actor that explores least": [
            "evaluator/score$",
            "evaluator/best_score$",
            "actor_highest_id/score$",
        ],
        "Mean Q-value: what the learner expects": ["learner/mean_q$"],
        "Loss": ["learner/loss$"],
        "Gradient norm, before it is clipped": ["learner/gradient_norm$"],
        "Environment steps per second": ["actors/steps_per_second$"],
        "Updates per second": ["learner/updates_per_second$"],
        "Replay memory: transitions held": ["replay/size$"],
        "Samples per insert: how often a transition is learned from": ["replay/samples_per_insert$"],
        "Policy lag: updates since the policy that chose the action": ["learner/policy_lag$"],
        "Limited by: 1 while this part is what the run waits for": ["limited_by/"],
    },
    SCORES: {
        "Score of every actor, by its epsilon": ["actors/score_"],
        "Mean score of all actors": ["actors/mean_score$"],
        "Score by the evaluator: mean and median": ["evaluator/score"],
        "Length of a game, in steps": ["evaluator/length$", "actor_highest_id/length$"],
    },
    LEARNER: {
        "|TD error|: how wrong it is": ["learner/td_error$"],
        "Updates until now": ["learner/updates$"],
        "Samples per second": ["learner/samples_per_second$"],
        "Share of the time that each part waits or works": [
            "learner/wait_share$",
            "learner/loader_busy_share$",
            "actors/wait_share$",
            "replay/busy_share$",
        ],
    },
    REPLAY: {
        "Transitions inserted and drawn until now": ["replay/num_"],
        "Transitions inserted and drawn per second": ["replay/inserts_per_second$", "replay/samples_per_second$"],
        "Bytes of compressed frames, and the most there may be": ["replay/bytes$", "replay/max_bytes$"],
    },
    TROUBLE: {
        "Messages that were refused": ["refused/", "replay/refused$", "learner/refused_batches$"],
        "Peers and messages that were ignored": ["replay/ignored_"],
        "Updates that were skipped, for their loss was not finite": ["learner/skipped_updates$"],
        "Games cut off by a fault of the environment": ["actors/environment_faults$"],
    },
}
