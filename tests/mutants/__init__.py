"""Mutation testing: checks that the unit tests notice small errors in the code that learns, stores and sends.

`python -m tests.mutants --seed 1 --count 40` draws errors, puts each into a copy of the tree and runs the tests there.
"""
