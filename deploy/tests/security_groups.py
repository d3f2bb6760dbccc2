"""Security groups, kept to by the kernel of each machine: its routing rules have no way for what no group lets through.

Of a packet the rules look at addresses, protocol and port, so iproute2 is all that they need. They keep no state, as
AWS does: an answer is what comes from a port to which the machine may connect, or leaves from one where it may be
reached. Only TCP is held back, as the groups speak of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

METADATA = "169.254.169.254"  # AWS lets nobody's groups keep a machine from it


class Passage(NamedTuple):
    """A direction in which one machine lets connections through."""

    inward: bool
    other: str  # CIDR block
    ports: str  # as `ip rule` takes them: 443, 22002-22632


def passages(rules: Iterable[Mapping[str, Any]], groups: set[str], members: Mapping[str, set[str]]) -> set[Passage]:
    """What a machine in `groups` lets through, of EC2's own list of rules; `members` has addresses by group."""
    found = set()
    for rule in rules:
        if rule["GroupId"] not in groups or "CidrIpv6" in rule:  # The machines here have no such addresses.
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
    """Routing rules of a machine that nobody reaches, and that reaches nobody; its own addresses stay its own."""
    return [
        "rule add pref 10 iif lo lookup local",
        "rule add pref 20 not ipproto tcp lookup local",  # ARP is one of these
        "rule add pref 30 not ipproto tcp lookup main",
        f"rule add pref 40 from {METADATA} lookup local",
        f"rule add pref 50 iif lo to {METADATA} lookup main",
        "rule add pref 1000 blackhole",
        "rule del pref 0",
        "rule del pref 32766",
        "rule del pref 32767",
    ]


def opened(passage: Passage) -> list[str]:
    """Routing rules for the connections of one passage: for what asks, and for what answers."""
    ways = {"in": f"from {passage.other} {{}} lookup local", "out": f"iif lo to {passage.other} {{}} lookup main"}
    asks, answers = ("in", "out") if passage.inward else ("out", "in")
    return [
        f"rule add pref 100 {ways[asks].format(f'ipproto tcp dport {passage.ports}')}",
        f"rule add pref 100 {ways[answers].format(f'ipproto tcp sport {passage.ports}')}",
    ]
