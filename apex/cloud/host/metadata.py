"""Reads the EC2 instance metadata service, version 2, which requires a token."""

import urllib.error
import urllib.request

ADDRESS = "http://169.254.169.254"
TIMEOUT_SECONDS = 2.0
TOKEN_SECONDS = 60  # lifetime of a token; each read requests a new one


class Metadata:
    """The metadata service at `address`. All methods raise OSError if it does not answer."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # uses no proxy

    def instance_id(self) -> str:
        """Returns this instance's id."""
        return self._require("instance-id")

    def private_address(self) -> str:
        """Returns this instance's private IPv4 address."""
        return self._require("local-ipv4")

    def spot_notice(self) -> str:
        """Returns the announced interruption of this spot instance, as JSON with action and time; "" if none."""
        return self._read("spot/instance-action")

    def _require(self, name: str) -> str:
        found = self._read(name)
        if not found:
            raise OSError(f"the metadata service at {self._address} has no {name}")
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
