"""What EC2 tells a machine about itself: its instance metadata, version 2 only (a token first)."""

from __future__ import annotations

import urllib.error
import urllib.request

ADDRESS = "http://169.254.169.254"
TIMEOUT_SECONDS = 2.0
TOKEN_SECONDS = 60  # a token's life; one is asked for each time


class Metadata:
    """The metadata service at `address`."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # Nobody's proxy is asked.

    def instance_id(self) -> str:
        """This machine's name in EC2. Raises OSError where there is no such service."""
        found = self._read("instance-id")
        if not found:
            raise OSError(f"{self._address} does not tell this machine's instance id")
        return found

    def spot_notice(self) -> str:
        """What the market has announced, as JSON: action and time; "" while it has nothing to say."""
        return self._read("spot/instance-action")

    def _read(self, path: str) -> str:
        life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        token = self._ask("/latest/api/token", "PUT", life)
        try:
            return self._ask(f"/latest/meta-data/{path}", "GET", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def _ask(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._address + path, method=method, headers=headers)
        with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read(65_536).decode())
