"""The evaluator service: evaluates the newest parameters until the run ends."""

import logging

import torch

from apex.algorithms.interface import make_algorithm
from apex.environments.foreign import require_trust
from apex.evaluation.evaluator import Evaluator
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome
from apex.transport.messages.results import EvaluationResult
from apex.transport.run_codec import RunCodec
from apex.types import Parameters, Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.sockets import open_context

log = logging.getLogger("apex")


class RemoteLearner:
    """Receives parameters from a learner's socket and sends results over the evaluator's session."""

    session: Session  # set before the first evaluation

    def __init__(self, subscriber: ParameterSubscriber, codec: RunCodec) -> None:
        self._codec = codec
        self.newest = subscriber.receive

    def final(self) -> int | None:
        """Returns the version of the run's last parameters; None while training continues."""
        return self.session.final

    def keep(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Sends a result to the coordinator."""
        log.info("evaluated update %d: mean score %.1f over %d games", result.updates, result.mean, result.episodes)
        self.session.post(self._codec.encode_evaluation(result, parameters))


def run_service(welcome: Welcome, stop: Stop) -> int:
    """Evaluates the newest parameters until the run ends; returns the exit status."""
    require_trust(welcome.config, given=bool(welcome.route.keys))
    config, codec = welcome.config, RunCodec(welcome.run_id, welcome.schema)
    torch.set_num_threads(config.evaluator.num_threads)
    with open_context(read_keys(config.transport.keys, Role.EVALUATOR)) as context:
        subscriber = ParameterSubscriber(
            context, welcome.endpoint("parameters"), codec, num_parameters=welcome.num_parameters
        )
        learner = RemoteLearner(subscriber, codec)
        algorithm = make_algorithm(config, welcome.schema)
        agent = algorithm.make_agent(algorithm.make_network())
        evaluator = Evaluator(config, agent, learner, life=welcome.session)
        learner.session = session = Session(welcome, Role.EVALUATOR, stop, evaluator.status)
        try:
            evaluator.run(stop)
            session.check()
            return NEIGHBOUR_GONE if session.lost or session.interrupted else FINISHED
        finally:
            session.close()
