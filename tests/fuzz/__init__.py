"""Fuzzing of every message type against a slow reference, written from docs/protocol.md alone.

`python -m tests.fuzz --messages 1000000 --type segment --seed 1` runs long; tests/fuzz/test_fuzz.py runs short.
"""
