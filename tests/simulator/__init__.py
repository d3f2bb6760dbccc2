"""A deterministic simulation of the protocol, from a seed: a run of the trainer, or a server of tables, with faults.

`python -m tests.simulator --seeds 20000` runs long; tests/simulator/test_simulator.py runs short.
"""
