"""What an hour costs, about: list prices, by hand in aws_prices.json, which Terraform's cost line reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

HOURS = 730  # of a month, as AWS reckons


class Prices(NamedTuple):
    """US dollars. Other regions cost up to a third more, and prices change."""

    region: str
    as_of: str
    spot_share: float  # of the list price, that a spot instance is reckoned with
    disk_gb_month: float
    snapshot_gb_month: float
    bucket_gb_month: float
    log_gb_month: float
    address_hour: float  # a public IPv4 address, in use or not
    nat_gateway_hour: float
    endpoint_hour: float  # an interface endpoint; gateways are free
    instance_hour: dict[str, float]

    def host(self, instance_type: str, *, spot: bool, public: bool) -> float | None:
        """A running host's hour without its disks; None for a type that the table lacks."""
        price = self.instance_hour.get(instance_type)
        if price is None:
            return None
        return price * (self.spot_share if spot else 1.0) + (self.address_hour if public else 0.0)

    def source(self) -> str:
        """Where the figures come from."""
        share = f"spot reckoned with {self.spot_share:.0%}"
        return f"list prices of {self.region}, {self.as_of}, {share}; traffic and requests are not in it"


def read_prices() -> Prices:
    """The table of this package."""
    found = json.loads(Path(__file__).with_name("aws_prices.json").read_text())
    return Prices(**{name: found[name] for name in Prices._fields})
