"""Security groups, enforced by the kernel of each machine with routing rules that have no route for forbidden packets.

The rules check addresses, protocol and port, so that only iproute2 is needed. Unlike AWS, they keep no state: an answer
comes from a port to which the machine may connect, or leaves from a port that others may reach. Only TCP is restricted,
because the groups contain nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

METADATA = "169.254.169.254"  # AWS does not restrict the metadata service by groups.


class Passage(NamedTuple):
    """A direction in which a machine permits connections."""

    inward: bool
    other: str  # CIDR block
    ports: str  # ports in the format of `ip rule`: 443, 21004-21634


def passages(rules: Iterable[Mapping[str, Any]], groups: set[str], members: Mapping[str, set[str]]) -> set[Passage]:
    """Returns the permitted directions of a machine in `groups`, from EC2's list of rules; `members`: addresses by
    group.
    """
    found = set()
    for rule in rules:
        if rule["GroupId"] not in groups or "CidrIpv6" in rule:  # Machines have no addresses of this kind here.
            continue
        assert rule["IpProtocol"] == "tcp", rule
        if "ReferencedGroupInfo" in rule:
            others = {f"{address}/32" for address in members.get(rule["ReferencedGroupInfo"]["GroupId"], set())}
        else:
            others = {rule["CidrIpv4"]}
        ports = "-".join(map(str, sorted({rule["FromPort"], rule["ToPort"]})))
        found |= {Passage(not rule["IsEgress"], other, ports) for other in others}
    return found


def closed() -> list[str]:
    """Returns routing rules of a machine that can reach nothing but itself and cannot be reached."""
    return [
        "rule add pref 10 iif lo lookup local",
        "rule add pref 20 not ipproto tcp lookup local",  # ARP requests are looked up like this.
        "rule add pref 30 not ipproto tcp lookup main",
        f"rule add pref 40 from {METADATA} lookup local",
        f"rule add pref 50 iif lo to {METADATA} lookup main",
        "rule add pref 1000 blackhole",
        "rule del pref 0",
        "rule del pref 32766",
        "rule del pref 32767",
    ]


def opened(passage: Passage) -> list[str]:
    """Returns the routing rules for the connections of one direction: requests and answers."""
    ways = {"in": f"from {passage.other} {{}} lookup local", "out": f"iif lo to {passage.other} {{}} lookup main"}
    asks, answers = ("in", "out") if passage.inward else ("out", "in")
    return [
        f"rule add pref 100 {ways[asks].format(f'ipproto tcp dport {passage.ports}')}",
        f"rule add pref 100 {ways[answers].format(f'ipproto tcp sport {passage.ports}')}",
    ]
