"""The order in which a sampler process answers requests that wait."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from apexreplay.server import sampler
from apexreplay.server.sampler import WaitingRequests, answer_first


class Drawer:
    """Gives batches of at most `items` items."""

    part_size = 0

    def __init__(self, items):
        self.items = items
        self.tried = []

    def draw(self):
        self.tried.append(self.part_size)
        return self.part_size if self.part_size <= self.items else None

    def confirm(self):
        self.tried.append("given")

    def take_back(self):
        self.tried.append("back")


class Receiver:
    gone: ClassVar = {b"gone"}

    def __init__(self):
        self.answered = []

    def answer(self, client, part):
        self.answered.append((client, part))
        return client not in self.gone


REQUESTS = (b"a", 10), (b"b", 10), (b"c", 4), (b"d", 4), (b"e", 20), (b"a", 2)


def make_waiting(requests):
    waiting = WaitingRequests()
    assert not waiting.extend(requests)
    return waiting


@pytest.mark.parametrize(
    ("items", "answered", "tried"),
    [
        (9, (b"c", 4), [10, 4, "given"]),
        (10, (b"a", 10), [10, "given"]),
        (3, (b"a", 2), [10, 4, 2, "given"]),
        (1, None, [10, 4, 2]),
    ],
)
def test_the_oldest_request_that_is_possible_is_answered(items, answered, tried):
    waiting, drawer, receiver = make_waiting(REQUESTS), Drawer(items), Receiver()
    assert answer_first(waiting, drawer, receiver, any_size=True) is (answered is not None)
    assert receiver.answered == [answered] * (answered is not None)
    assert drawer.tried == tried
    rest = list(REQUESTS)
    if answered:
        rest.remove(answered)
    assert list(waiting) == rest


def test_requests_are_answered_in_their_order():
    waiting, receiver = make_waiting(REQUESTS), Receiver()
    for items in (1, 10, 1, 10, 3, 10, 10, 10, 100, 100):
        answer_first(waiting, Drawer(items), receiver, any_size=True)
    assert receiver.answered == [REQUESTS[index] for index in (0, 1, 5, 2, 3, 4)]


def test_a_limit_of_all_batches_is_asked_once():
    drawer = Drawer(0)
    assert not answer_first(make_waiting(REQUESTS), drawer, SimpleNamespace(), any_size=False)
    assert drawer.tried == [10]


def test_the_batch_of_a_client_that_is_gone_is_taken_back():
    waiting, drawer = make_waiting([(b"gone", 3), (b"a", 3)]), Drawer(3)
    assert answer_first(waiting, drawer, Receiver(), any_size=True)
    assert drawer.tried == [3, "back"]
    assert list(waiting) == [(b"a", 3)]


def test_one_client_cannot_drop_the_requests_of_others(monkeypatch):
    monkeypatch.setattr(sampler, "MAX_WAITING", 6)
    monkeypatch.setattr(sampler, "MAX_OF_CLIENT", 4)
    waiting = make_waiting([(b"a", 1)])
    assert waiting.extend([(b"b", 1)] * 9) == {"credit": 5}
    assert list(waiting) == [(b"a", 1), *[(b"b", 1)] * 4]
    assert waiting.extend([(b"c", 1)] * 3) == {"dropped": 2}  # The oldest ones may be of clients that are gone.
    assert list(waiting) == [*[(b"b", 1)] * 3, *[(b"c", 1)] * 3]
    waiting.remove(0)
    assert waiting.extend([(b"b", 1)] * 2) == {"dropped": 1}
    assert len(waiting) == 6
