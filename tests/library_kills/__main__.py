"""`python -m tests.library_kills`: kills server, writers and samplers at random, and audits the memory."""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from .campaign import BrokenError, Campaign
from .tables import KINDS


def main() -> int:
    """Returns 1 if an acknowledged item was lost or stored twice, or if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.library_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, metavar="N", help="number of kills; default 300")
    parser.add_argument("--kind", action="append", choices=KINDS, help="kind of table; default each, one after another")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the kills; default 0")
    options = parser.parse_args()
    failed = False
    for kind in options.kind or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            campaign = Campaign(Path(folder), [kind], options.seed)
            try:
                failed |= not run(campaign, kind, options.kills)
            except BrokenError as error:
                failed = True
                log = (Path(folder) / "server.log").read_text(errors="replace")
                print(f"{kind}: {error}\n{log[-6_000:]}", flush=True)
            finally:
                campaign.close()
    return int(failed)


def run(campaign: Campaign, kind: str, kills: int) -> bool:
    """Returns whether all promises were kept."""
    began = time.monotonic()
    campaign.start_server()
    campaign.wait_until_ready()
    campaign.start_programs()
    for _ in range(kills):
        campaign.kill()
    campaign.wait_until_ready()
    campaign.stop_programs()
    items = campaign.read(kind)
    audits = {"memory": campaign.audit(kind, items)}
    campaign.stop_server(signal.SIGTERM)
    campaign.start_server()
    campaign.wait_until_ready()
    audits["after a stop"] = campaign.audit(kind, campaign.read(kind))
    campaign.stop_server(signal.SIGKILL)
    end_key = campaign.newest_snapshot(kind)
    campaign.remove_memories()
    campaign.start_server()
    campaign.wait_until_ready()
    restored = campaign.read(kind)
    campaign.stop_server(signal.SIGTERM)
    killed = ", ".join(f"{count} of {name}" for name, count in sorted(campaign.kills.items()))
    seconds, batches = time.monotonic() - began, campaign.progress("sampler")
    print(f"{kind}: {kills} kills ({killed}) in {seconds:.0f} s, {batches:,} batches")
    for name, audit in audits.items():
        numbers = f"{audit.items:,} items, {audit.acknowledged:,} acknowledged, {audit.lost} lost, {audit.twice} twice"
        print(f"  {name}: {numbers}")
    missing = sum(restored.get(key) != item for key, item in items.items() if key < end_key)
    print(f"  from the newest snapshot: {len(restored):,} items, {missing} of {end_key:,} missing", flush=True)
    if kind == "queue":
        print(f"  given more than once: {campaign.given_twice()}", flush=True)
        missing += campaign.given_twice()
    kept = all(audit.lost == audit.twice == 0 < audit.acknowledged for audit in audits.values())
    return kept and missing == 0 and end_key > 0


if __name__ == "__main__":
    sys.exit(main())
