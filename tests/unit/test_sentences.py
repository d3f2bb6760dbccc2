"""The sentences of all records, which no other test repeats."""

from typing import get_args

from apex import facts, sentences
from tests.golden.sentences import GOLDEN, examples, render

WITHOUT_SENTENCE = {facts.Record, facts.Ending}


def test_sentences_equal_the_golden_file():
    """To change a sentence: `.venv/bin/python -m tests.golden.sentences`, and read the difference."""
    assert render() == GOLDEN.read_text()


def test_each_record_has_an_example():
    records = {each for each in vars(facts).values() if isinstance(each, type) and issubclass(each, facts.Record)}
    assert {type(record) for record in examples()} == records - WITHOUT_SENTENCE


def test_each_phase_has_a_sentence():
    assert set(sentences.PHASES) == set(get_args(facts.Phase))
