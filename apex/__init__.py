"""Ape-X over ZeroMQ: distributed prioritized experience replay (Horgan et al. 2018)."""

__version__ = "0.1.0"
