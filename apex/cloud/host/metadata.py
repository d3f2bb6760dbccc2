"""What EC2 tells an instance about itself: the instance metadata service, version 2 (which asks for a token)."""

from __future__ import annotations

import urllib.error
import urllib.request

ADDRESS = "http://169.254.169.254"
TIMEOUT_SECONDS = 2.0
TOKEN_SECONDS = 60  # a token's life; each read takes a new one


class Metadata:
    """The metadata service at `address`. All methods raise OSError where it does not answer."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy

    def instance_id(self) -> str:
        """This instance's id."""
        return self._require("instance-id")

    def private_address(self) -> str:
        """This instance's private IPv4 address."""
        return self._require("local-ipv4")

    def spot_notice(self) -> str:
        """The announced interruption of a spot instance, as JSON with action and time; "" while there is none."""
        return self._read("spot/instance-action")

    def _require(self, name: str) -> str:
        found = self._read(name)
        if not found:
            raise OSError(f"{self._address} has no {name}")
        return found

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
