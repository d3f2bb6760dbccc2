"""Readers get the newest parameters completely, even while the writer publishes newer ones."""

import multiprocessing

import numpy as np

from apex.acting.shared_parameters import SharedParameters
from apex.types import Parameters


def parameters(number, size=8):
    return Parameters(10 * number, np.full(size, number, np.float32))


def test_there_are_no_parameters_before_the_first_publication():
    assert SharedParameters(8).newer(0) is None


def test_the_newest_parameters_are_returned_once():
    shared = SharedParameters(8)
    for number in range(1, 5):
        shared.publish(parameters(number))
    number, newest = shared.newer(0)
    assert newest.version == 40
    assert (newest.values == 4).all()
    assert shared.newer(number) is None
    shared.publish(parameters(5))
    assert shared.newer(number)[1].version == 50


def test_parameters_that_were_read_do_not_change():
    shared = SharedParameters(8)
    shared.publish(parameters(1))
    _, first = shared.newer(0)
    for number in range(2, 6):
        shared.publish(parameters(number))
    assert (first.values == 1).all()


def test_a_reader_in_another_process_never_gets_a_mixture():
    shared = SharedParameters(200_000)
    context = multiprocessing.get_context("fork")
    done = context.Event()

    def publish():
        for number in range(1, 400):
            shared.publish(parameters(number, 200_000))
        done.set()

    writer = context.Process(target=publish)
    writer.start()
    known, last = 0, 0
    while not done.is_set() or shared.newer(known):
        news = shared.newer(known)
        if news is None:
            continue
        known, newest = news
        assert newest.values.min() == newest.values.max() == newest.version / 10
        assert newest.version > last
        last = newest.version
    writer.join(10)
    assert last == 3990
