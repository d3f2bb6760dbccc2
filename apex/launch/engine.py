"""The options of `--engine ray` and `apex.train(config, engine=...)`. This module does not import Ray."""

import argparse
from dataclasses import dataclass, fields
from typing import Any, Self

from apex.config.arguments import Parser, non_negative_int
from apexreplay.errors import require

LOCAL, RAY = "local", "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngine:
    """The size and place of a run on a Ray cluster: one unit for the head and one for each actor host."""

    address: str = ""  # HOST:PORT of the cluster; "": the running cluster, or else a new local one
    actor_hosts: int = 1  # number of units for actors, spread over the nodes; extra units wait for a node
    cpus_per_host: int = 1  # CPUs and actor processes of each actor host
    head_cpus: int = 1  # CPUs of the head; the learner is sized for them
    insecure_no_auth: bool = False  # accept a cluster without authentication

    def __post_init__(self) -> None:
        for name in ("actor_hosts", "cpus_per_host", "head_cpus"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(type(value) is int and value >= 1, f"{option} must be a whole number >= 1, got {value!r}")
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
        ("--actor-hosts", "number of actor hosts, which Ray places and restarts; default 1"),
        ("--cpus-per-host", "CPUs and actor processes of each actor host; default 1"),
        ("--head-cpus", "CPUs of the head; the learner is sized for them; default 1"),
    ):
        ray.add_argument(option, type=non_negative_int, metavar="N", help=text)


def require_engine(options: argparse.Namespace) -> None:
    """Raises UsageError if an option for Ray is given without `--engine ray`."""
    given = [field.name for field in fields(RayEngine) if getattr(options, field.name, None) is not None]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    require(options.engine == RAY or not given, f"{names}: only with --engine ray", remedy="add it, or leave them out")
