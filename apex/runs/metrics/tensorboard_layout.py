"""The arrangement of TensorBoard's page Custom Scalars: the most important charts first, on one screen."""

from __future__ import annotations

Layout = dict[str, dict[str, list[str]]]  # category -> title of a chart -> the tags in it, as regular expressions

GLANCE = "1. The run at a glance"
SCORES, LEARNER, REPLAY, TROUBLE = "2. Games", "3. Learner", "4. Replay memory", "5. Trouble: all of it should be 0"

# TensorBoard matches the beginning of a tag: without the $, evaluator/score would match evaluator/score_median too.
LAYOUT: Layout = {
    GLANCE: {
        "Greedy score, and the best so far": ["evaluator/score$", "evaluator/best_score$"],
        "Score of the actor that explores least": ["actor_highest_id/score$"],
        "Limited by: 1 for the part to make faster": ["limited_by/"],
        "Loss": ["learner/loss$"],
        "Mean Q-value: the return it expects": ["learner/mean_q$"],
        "Gradient norm, before clipping": ["learner/gradient_norm$"],
        "Environment steps per second": ["actors/steps_per_second$"],
        "Updates per second": ["learner/updates_per_second$"],
        "Policy lag: age of the data, in updates": ["learner/policy_lag$"],
        "Transitions in the replay memory": ["replay/size$"],
        "Samples drawn per transition inserted": ["replay/samples_per_insert$"],
        "|TD error|: how wrong its Q-values are": ["learner/td_error$"],
    },
    SCORES: {
        "Score of every actor, by its epsilon": ["actors/score_"],
        "Mean score of all actors": ["actors/mean_score$"],
        "Greedy score: mean, its 95 % interval, median": ["evaluator/score"],
        "Length of a game, in steps": ["evaluator/length$", "actor_highest_id/length$"],
    },
    LEARNER: {
        "Updates until now": ["learner/updates$"],
        "Samples per second": ["learner/samples_per_second$"],
        "Learning rate": ["learner/learning_rate$"],
        "Dormant share of the worst hidden layer": ["learner/dormant_share$"],
        "Share of its time that a part waits or works": [
            "learner/wait_share$",
            "learner/loader_busy_share$",
            "actors/wait_share$",
            "replay/busy_share$",
        ],
    },
    REPLAY: {
        "Transitions inserted and drawn, in all": ["replay/num_"],
        "Transitions inserted and drawn per second": ["replay/inserts_per_second$", "replay/samples_per_second$"],
        "Bytes of frames, and the most there may be": ["replay/bytes$", "replay/max_bytes$"],
    },
    TROUBLE: {
        "Messages that were refused": ["refused/", "replay/refused$", "learner/refused_batches$"],
        "Updates skipped: a loss was not finite": ["learner/skipped_updates$"],
        "Games cut off by an environment's fault": ["actors/environment_faults$"],
    },
}
