"""AWS outside the machines of an emulated cluster: its interfaces on port 443, and each machine's metadata."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from namespaces import Network
from security_groups import METADATA
from werkzeug.serving import make_server

AWS = "198.51.100.1"
ENDPOINT = f"http://{AWS}:443"  # without TLS, on the only port that machines may connect to outside


@contextmanager
def cloud(network: Network, instances: Mapping[str, str]) -> Iterator[None]:
    """Serves both in `network`, which has the addresses. `instances` has ids by address, and may grow.

    The interfaces are those of this process's AWS, so they include everything that Terraform has made.
    """
    interfaces, metadata = (network.within(lambda at=at: _listen(*at)) for at in ((AWS, 443), (METADATA, 80)))
    with interfaces, metadata:
        application = DomainDispatcherApplication(create_backend_app)
        aws = make_server(
            AWS, 443, application, threaded=True, request_handler=MotoRequestHandler, fd=interfaces.fileno()
        )
        handler = metadata_handler(lambda address: {"instance-id": instances.get(address, ""), "local-ipv4": address})
        metadata_server = http.server.ThreadingHTTPServer((METADATA, 80), handler, bind_and_activate=False)
        metadata_server.socket.close()
        metadata_server.socket = metadata
        threads = [threading.Thread(target=server.serve_forever, args=[0.1]) for server in (aws, metadata_server)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            aws.shutdown()
            metadata_server.shutdown()
            for thread in threads:
                thread.join()
            aws.server_close()
            metadata_server.server_close()


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


def metadata_handler(find: Callable[[str], Mapping[str, str]]) -> type[http.server.BaseHTTPRequestHandler]:
    """Returns version 2 of the metadata service, which needs a token. `find` returns the values for an address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            good = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._answer(200 if good else 400, "a token")

        def do_GET(self) -> None:
            known = self.headers["X-aws-ec2-metadata-token"] == "a token"
            value = find(self.client_address[0]).get(self.path.removeprefix("/latest/meta-data/"))
            self._answer(401 if not known else 404 if value is None else 200, value or "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            """Logs nothing."""

    return Handler
