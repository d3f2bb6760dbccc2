"""Ray Tune with ASHA: eight settings of CartPole, of which the worse ones end early. Needs `pip install 'ray[tune]'`.

python examples/ray_tune.py
python examples/ray_tune.py --trials 4 --max-minutes 0.2

Each trial is a run of its own on one node of the cluster; Ray starts as many at once as CPUs are free.
"""

import argparse
import os
import queue
import threading

from ray import tune

import apex


class Report(apex.Callback):
    """Passes the score of each evaluation to the trial."""

    def __init__(self, scores):
        self.scores = scores

    def on_evaluation(self, run, evaluation):
        self.scores.put(evaluation.score)


class Trial(tune.Trainable):
    """One run. Ray calls `step` for each result, and `cleanup` when ASHA has ended the trial."""

    def setup(self, config):
        self.scores, self.is_over, self.last, self.error = queue.SimpleQueue(), False, 0.0, None
        limits = {"max_minutes": config["max_minutes"], "tensorboard": False}
        rest = {"actor": {"num_actors": 4}, "evaluator": {"period_seconds": 1.0, "num_envs": 10}, "run": limits}
        settings = apex.preset("cartpole", learner={"learning_rate": config["learning_rate"]}, **rest)
        self.thread = threading.Thread(target=self.train_run, args=[settings])
        self.thread.start()

    def train_run(self, settings):
        try:
            apex.train(settings, quiet=True, stop=lambda: self.is_over, callbacks=[Report(self.scores)])
        except Exception as error:
            self.error = error

    def step(self):
        while self.thread.is_alive() or not self.scores.empty():
            try:
                self.last = self.scores.get(timeout=1.0)
                return {"score": self.last, "ended": False}
            except queue.Empty:
                pass  # The run has not evaluated yet, or has ended.
        if self.error is not None:
            raise self.error
        return {"score": self.last, "ended": True, "done": True}

    def save_checkpoint(self, folder):
        pass  # The run has its own checkpoints.

    def cleanup(self):
        self.is_over = True
        self.thread.join()  # The run saves its last checkpoint.


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--max-minutes", type=float, default=0.5)
    options = parser.parse_args()
    rates = tune.loguniform(1e-5, 1e-2)
    tuner = tune.Tuner(
        tune.with_resources(Trial, {"cpu": 1}),
        param_space={"learning_rate": rates, "max_minutes": options.max_minutes},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=options.trials,
            scheduler=tune.schedulers.ASHAScheduler(max_t=1_000, grace_period=3, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="cartpole", storage_path=os.path.abspath("ray-results"), verbose=1),
    )
    results = tuner.fit()
    best = results.get_best_result(scope="last")
    ended = sum(not result.metrics["ended"] for result in results)
    print(f"{len(results)} trials, {ended} ended early by ASHA, {results.num_errors} failed")
    print(f"best: learning rate {best.config['learning_rate']:.2g}, score {best.metrics['score']:.0f}")


if __name__ == "__main__":
    main()
