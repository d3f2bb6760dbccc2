"""Kills the programs of a server of tables at random, and checks that no acknowledged item is lost or stored twice."""
