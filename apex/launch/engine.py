"""The options of `--engine ray` and `apex.train(config, engine=...)`. This module does not import Ray."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import mode
from typing import Any, Self

from apex.config.arguments import Parser, non_negative_int
from apexreplay.errors import require

LOCAL, RAY = "local", "ray"
SIZES = ("actor_hosts", "cpus_per_host", "head_cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngine:
    """The size and place of a run on a Ray cluster: one unit for the head and one for each actor host."""

    address: str = ""  # HOST:PORT of the cluster; "": the running cluster, or else a new local one
    # Each of these is chosen if it is 0: see `fit`.
    actor_hosts: int = 0  # number of units for actors, spread over the nodes; extra units wait for a node
    cpus_per_host: int = 0  # CPUs and actor processes of each actor host
    head_cpus: int = 0  # CPUs of the head; the learner is sized for them
    insecure_no_auth: bool = False  # accept a cluster without authentication

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(type(value) is int and value >= 0, f"{option} must be a whole number >= 0, got {value!r}")
        require(
            not self.address.startswith("ray://"),
            f"--address {self.address}: Ray Client addresses are not supported",
            remedy="run this command on a host of the cluster, or use ray job submit",
        )

    @classmethod
    def read(cls, options: argparse.Namespace, base: dict[str, Any] | None = None) -> Self:
        """Returns `base`, overridden by the options of the command line."""
        typed = {field.name: getattr(options, field.name, None) for field in fields(cls)}
        return cls(**{**(base or {}), **{name: value for name, value in typed.items() if value is not None}})

    def fit(self, nodes: Sequence[tuple[bool, int]]) -> Self:
        """Chooses the sizes that are 0. If all are, the run uses the free CPUs of these nodes, else each is 1.

        A node: whether it has a GPU, and its free CPUs. The head gets the largest node, of those with a GPU if any has
        one, or half of the only node. Actor hosts are as large as most of the other nodes.
        """
        sizes = [getattr(self, name) for name in SIZES]
        usable = [cpus for _, cpus in sorted(nodes, reverse=True) if cpus]
        if usable and not any(sizes):
            head, *others = usable if len(usable) > 1 else [usable[0] // 2, usable[0] - usable[0] // 2]
            sizes = [sum(cpus // mode(others) for cpus in others), mode(others), head]
        chosen: dict[str, Any] = {name: size or 1 for name, size in zip(SIZES, sizes, strict=True)}
        return replace(self, **chosen)


def add_engine_options(parser: Parser) -> None:
    """Adds the options. An option that is not given has the value None."""
    parser.add_argument(
        "--engine", choices=(LOCAL, RAY), default=LOCAL, help="where the programs run (see docs/guide/scale.md)"
    )
    ray = parser.add_argument_group("with --engine ray")
    ray.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster; default: the running cluster, or else a new local one"
    )
    for option, text in (
        ("--actor-hosts", "number of actor hosts, which Ray places and restarts"),
        ("--cpus-per-host", "CPUs and actor processes of each actor host"),
        ("--head-cpus", "CPUs of the head; the learner is sized for them"),
    ):
        text += "; default 1, or all free CPUs without these three options"
        ray.add_argument(option, type=non_negative_int, metavar="N", help=text)


def require_engine(options: argparse.Namespace) -> None:
    """Raises UsageError if an option for Ray is given without `--engine ray`."""
    given = [field.name for field in fields(RayEngine) if getattr(options, field.name, None) is not None]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    require(options.engine == RAY or not given, f"{names}: only with --engine ray", remedy="add it, or leave them out")
