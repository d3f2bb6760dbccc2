"""The layout of TensorBoard's page Custom Scalars: the most important charts come first, on one screen."""

Layout = dict[str, dict[str, list[str]]]  # category -> title of a chart -> the tags in it, as regular expressions

GLANCE = "1. The run at a glance"
BOTTLENECK = "2. Bottleneck: 1 while this part limits training"
SCORES, LEARNER, REPLAY, RESOURCES = "3. Games", "4. Learner", "5. Replay memory", "6. CPU, memory and GPU"
TROUBLE = "7. Errors: all values should be 0"

# TensorBoard matches the beginning of a tag: without the $, evaluator/score would match evaluator/score_median too.
LAYOUT: Layout = {
    GLANCE: {
        "Greedy score, and best score so far": ["evaluator/score$", "evaluator/best_score$"],
        "Score of the actor that explores least": ["actor_highest_id/score$"],
        "Share of time in which the learner waits": ["learner/wait_share$"],
        "Loss": ["learner/loss$"],
        "Mean Q-value: the expected return": ["learner/mean_q$"],
        "Gradient norm, before clipping": ["learner/gradient_norm$"],
        "Environment steps per second": ["actors/steps_per_second$"],
        "Updates per second": ["learner/updates_per_second$"],
        "Policy lag: age of the data, in updates": ["learner/policy_lag$"],
        "Transitions in the replay memory": ["replay/size$"],
        "Samples drawn per transition inserted": ["replay/samples_per_insert$"],
        "|TD error|: error of the Q-values": ["learner/td_error$"],
    },
    BOTTLENECK: {  # TensorBoard draws all curves of a run in one colour, so each part has its own chart.
        "Actors": ["limited_by/actors$"],
        "Learner": ["limited_by/learner$"],
        "Loaders of batches": ["limited_by/loaders$"],
        "Replay server": ["limited_by/replay$"],
        "Processor of the learner's host": ["limited_by/processor$"],
        "Network between the programs": ["limited_by/wire$"],
    },
    SCORES: {
        "Score of every actor, by exploration": ["actors/score_"],
        "Mean score of all actors": ["actors/mean_score$"],
        "Greedy score: mean, 95 % interval, median": ["evaluator/score"],
        "Share of games with success, evaluated": ["evaluator_metrics/success$"],
        "Length of a game, in steps": ["evaluator/length$", "actor_highest_id/length$"],
    },
    LEARNER: {
        "Updates so far": ["learner/updates$"],
        "Samples per second": ["learner/samples_per_second$"],
        "Learning rate": ["learner/learning_rate$"],
        "Share of dormant units in the worst layer": ["learner/dormant_share$"],
        "Continuous actions: loss of the policy": ["learner/policy_loss$"],
        "Continuous actions: policy gradient norm": ["learner/policy_gradient_norm$"],
        "Continuous actions: share that is saturated": ["learner/action_saturation$"],
        "Share of time waiting or busy (see the tag)": [
            "learner/wait_share$",
            "learner/loader_busy_share$",
            "actors/wait_share$",
            "replay/busy_share$",
        ],
    },
    REPLAY: {
        "Transitions inserted and drawn, in total": ["replay/num_"],
        "Transitions inserted and drawn per second": ["replay/inserts_per_second$", "replay/samples_per_second$"],
        "Bytes of frames, and their maximum": ["replay/bytes$", "replay/max_bytes$"],
    },
    RESOURCES: {
        "Cores in use, by role": ["cores/"],
        "Memory in use, in bytes, by role": ["memory_bytes/"],
        "Share of time in which the GPU is busy": ["gpu_share/"],
        "GPU memory in use, in bytes": ["gpu_memory_bytes/"],
    },
    TROUBLE: {
        "Refused messages and connections": ["refused/", "replay/refused$", "learner/refused_batches$"],
        "Updates skipped because a loss was not finite": ["learner/skipped_updates$"],
        "Transitions skipped because they are unusable": ["learner/unusable_transitions$"],
        "Games cut off by an environment error": ["actors/environment_faults$"],
    },
}
