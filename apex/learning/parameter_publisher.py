"""The learner's thread that publishes parameters."""

import math

from apex.config import Config
from apex.runtime.hardware import read_link
from apex.transport.curve.key_store import Keys
from apex.transport.endpoints import ParameterPublisher
from apex.transport.run_codec import RunCodec
from apex.types import Parameters
from apexreplay.process.lifecycle import Helper, Stop
from apexreplay.transport.sockets import open_context

LINK_SHARE = 4  # parameters get one of so many parts of the link
ASSUMED_LINK = 10**10  # bits per second, if the system does not know them, as of many virtual interfaces


def publish_budget(config: Config, link: int | None = None) -> float:
    """Returns the bytes of parameters per second; `link`: bits per second of the link, 0: unknown, None: reads them."""
    link = read_link(config.transport.bind) if link is None else link
    return config.learner.publish_bytes_per_second or (link or ASSUMED_LINK) / 8 / LINK_SHARE


class PublishingThread:
    """Publishes parameters on a separate thread, so that new subscribers get them even during a long gradient step."""

    def __init__(
        self, endpoint: str, codec: RunCodec, stop: Stop, keys: Keys | None = None, budget: float = math.inf
    ) -> None:
        """`budget`: bytes per second to all subscribers together."""
        self._budget = budget
        self._endpoint = endpoint
        self._keys = keys
        self._codec = codec
        self._newest: Parameters | None = None
        self._closing = self._hurries = False
        self._helper = Helper("parameters", self._run, stop)
        self._helper.start()

    def publish(self, parameters: Parameters) -> None:
        """Publishes these parameters next; skips older parameters that were not published yet."""
        self._newest = parameters

    def hurry(self) -> None:
        """Ignores the budget from now on: training has ended, and the evaluator waits for the final policy."""
        self._hurries = True

    def check(self) -> None:
        """Raises the error that ended the thread, if there was one."""
        self._helper.check()

    def close(self) -> None:
        """Publishes the newest parameters and ends the thread."""
        self._closing = True
        self._helper.join(2.0)

    def _run(self) -> None:
        published: Parameters | None = None
        with open_context(self._keys) as context:
            publisher = ParameterPublisher(context, self._endpoint, self._codec, bytes_per_second=self._budget)
            while True:
                closing, newest = self._closing, self._newest
                if newest is not None and newest is not published:
                    publisher.publish(newest)
                    published = newest
                if closing or self._hurries:
                    publisher.flush()
                if closing:
                    return
                context.check()
                publisher.serve(0.02)
