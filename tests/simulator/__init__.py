"""A deterministic simulation of the protocol: actors, network, replay servers, learner and their faults, from a seed.

`python -m tests.simulator --seeds 20000` runs long; tests/simulator/test_simulator.py runs short.
"""
