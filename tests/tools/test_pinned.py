"""Tests do not repeat the product's messages, so that these can be reworded."""

from pathlib import Path

from tests.tools.pinned import find_messages

ROOT = Path(__file__).parents[2]
MOST_PINNED = 0.05  # of all messages
PRODUCT = """
'''A docstring of more than four words.'''
def check(n):
    raise ValueError(f"the number {n} is too small for this, use 3")
short = "three words only"
"""


def test_few_messages_are_pinned_outside_the_golden_file():
    messages = find_messages(ROOT)
    pinned = [message for message in messages if message.pinned_by]
    assert len(messages) > 500
    assert len(pinned) <= MOST_PINNED * len(messages), "\n".join(map(str, pinned))


def test_a_message_is_pinned_by_four_words_in_a_row(tmp_path):
    for name, text in {
        "apex/a.py": PRODUCT,
        "tests/test_a.py": 'match = r"too small for .*, use 3"',
        "tests/test_b.py": 'match = r"is\\ too small for"',
        "tests/golden/c.py": 'line = "is too small for this"',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (message,) = find_messages(tmp_path)
    assert message.text.startswith("the number")
    assert message.pinned_by == (Path("tests/test_b.py"),)
