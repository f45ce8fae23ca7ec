"""Servers of images that lead astray."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tessera.data.media.urls import UrlPolicy, download, is_allowed
from tests.errors import raises


@pytest.mark.parametrize("address", ["fec0::1", "3fff::1", "192.0.0.8", "168.63.129.16", "::ffff:168.63.129.16"])
def test_addresses_that_are_public_by_number_alone_are_refused(address: str) -> None:
    assert not is_allowed(address, private=False)


def test_a_redirect_to_what_is_no_url_is_told() -> None:
    class Astray(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://[bad")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Astray) as server:
        threading.Thread(target=server.handle_request).start()
        with raises("media.bad-redirect"):
            download(f"http://127.0.0.1:{server.server_port}/", UrlPolicy(private=True))
