"""The evaluator: full games of the newest parameters, now and then, while training goes on."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import torch

from apex.environment import make_environment
from apex.errors import ConfigError
from apex.evaluator_loop import EvaluationResult, Evaluator
from apex.key_folder import read_keys
from apex.lifecycle import (
    FINISHED,
    NEIGHBOUR_GONE,
    REFUSED,
    Stop,
    complain,
    configure_logging,
    stop_on_signals,
)
from apex.networks import make_network
from apex.session import Session, Welcome, add_route_options, greet, read_route, read_welcome
from apex.sockets import open_context
from apex.transport import ParameterSubscriber
from apex.types import Parameters as ParameterValues
from apex.wire import Codec

log = logging.getLogger("apex")


class _Subscription:
    """The parameters' socket as the evaluator sees it."""

    def __init__(self, subscriber: ParameterSubscriber) -> None:
        self._subscriber = subscriber

    def newest(self, timeout: float) -> ParameterValues | None:
        """The newest that were not yet returned, or None after `timeout` seconds without any."""
        return self._subscriber.receive(timeout)


class _Outbox:
    """Results go to the learner over the control socket."""

    session: Session

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def send(self, result: EvaluationResult, parameters: ParameterValues | None) -> None:
        """Sends a result, with its parameters when no evaluation before was better."""
        log.info("updates %d: mean %.1f over %d games", result.updates, result.mean, result.episodes)
        self.session.post(self._codec.encode_evaluation(result.to_dict(), parameters))


def main(argv: Sequence[str] | None = None) -> int:
    """`apex evaluator`: the composition root."""
    parser = argparse.ArgumentParser(prog="apex evaluator", description="Plays full games with the newest parameters.")
    add_route_options(parser)
    arguments = parser.parse_args(argv)
    configure_logging("evaluator")
    try:
        route = read_route(arguments)
        with stop_on_signals() as stop:
            answer = greet(route, "evaluator", stop)
            return _run(read_welcome(answer), stop) if answer else FINISHED
    except ConfigError as error:
        complain(f"apex evaluator: {error}")
        return REFUSED


def _run(welcome: Welcome, stop: Stop) -> int:
    config, codec = welcome.config, Codec(welcome.run_id, welcome.schema)
    torch.set_num_threads(config.evaluator.num_threads)
    with open_context(read_keys(config.transport.keys, "evaluator")) as context:
        subscriber = ParameterSubscriber(
            context, welcome.endpoint("parameters"), codec, num_parameters=welcome.num_parameters
        )
        outbox = _Outbox(codec)
        evaluator = Evaluator(
            config.evaluator,
            make_network(config.network, welcome.schema, seed=config.seed),
            stop_score=config.run.stop_score,
            seed=config.seed,
            make_environment=lambda num_envs, seed: make_environment(
                config.environment, num_envs, seed=seed, num_threads=1
            ),
            parameters=_Subscription(subscriber),
            results=outbox,
        )
        session = Session(welcome, "evaluator", stop, evaluator.status)
        outbox.session = session
        try:
            evaluator.run(stop)
            session.check()
            return NEIGHBOUR_GONE if session.lost else FINISHED
        finally:
            session.close()


if __name__ == "__main__":
    sys.exit(main())
