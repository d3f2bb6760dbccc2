"""The evaluator service: plays the newest parameters until the run ends."""

from __future__ import annotations

import logging

import torch

from apex.dqn.networks import make_network
from apex.environments.factory import make_environment
from apex.evaluation.evaluator import EvaluationResult, Evaluator
from apex.runtime.lifecycle import FINISHED, NEIGHBOUR_GONE, Stop
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome
from apex.transport.sockets import open_context
from apex.types import Parameters as ParameterValues

log = logging.getLogger("apex")


class _LearnerLink:
    """Receives parameters from the learner, and sends results over the control socket."""

    session: Session

    def __init__(self, codec: Codec, subscriber: ParameterSubscriber) -> None:
        self._codec = codec
        self._subscriber = subscriber

    def newest(self, timeout: float) -> ParameterValues | None:
        """The newest parameters that were not yet returned, or None after `timeout` seconds without any."""
        return self._subscriber.receive(timeout)

    def send(self, result: EvaluationResult, parameters: ParameterValues | None) -> None:
        """Sends a result, with its parameters if no earlier evaluation was better."""
        log.info("updates %d: mean %.1f over %d games", result.updates, result.mean, result.episodes)
        self.session.post(self._codec.encode_evaluation(result.to_dict(), parameters))


def run_service(welcome: Welcome, stop: Stop) -> int:
    """Evaluates the newest parameters until the run ends; returns the exit status."""
    config, codec = welcome.config, Codec(welcome.run_id, welcome.schema)
    torch.set_num_threads(config.evaluator.num_threads)
    with open_context(read_keys(config.transport.keys, "evaluator")) as context:
        subscriber = ParameterSubscriber(
            context, welcome.endpoint("parameters"), codec, num_parameters=welcome.num_parameters
        )
        learner = _LearnerLink(codec, subscriber)
        evaluator = Evaluator(
            config.evaluator,
            make_network(config.network, welcome.schema, seed=config.seed),
            stop_score=config.run.stop_score,
            seed=config.seed,
            make_environment=lambda num_envs, seed: make_environment(
                config.environment, num_envs, seed=seed, num_threads=1
            ),
            learner=learner,
        )
        session = Session(welcome, "evaluator", stop, evaluator.status)
        learner.session = session
        try:
            evaluator.run(stop)
            session.check()
            return NEIGHBOUR_GONE if session.lost else FINISHED
        finally:
            session.close()
