"""Images by URL: fetched only where a recipe says so, from public addresses, within limits, once."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from data_cases import LetterProcessor, row, write_jsonl
from test_data_sources_asked import png

from tessera.config.reader import build
from tessera.config.run_config import DataSection, SourceSection
from tessera.core.sample import Part
from tessera.data.index.build import IndexMaker
from tessera.data.media.files import Limits, limits_of
from tessera.data.media.read import decode, probe
from tessera.data.media.urls import UrlPolicy, download, fetch_image, is_allowed
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tests.errors import raises

Answer = Callable[[BaseHTTPRequestHandler], None]


def send(request: BaseHTTPRequestHandler, content: bytes, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    arguments = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Content-Length": str(len(content)), **arguments}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    for _ in range(10_000):
        request.wfile.write(bytes(10_000))


DRIPS = 10_000  # for minutes, or until whoever asked has gone


def dripping(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    for _ in range(DRIPS):
        request.wfile.write(b"\xff")
        time.sleep(0.02)


def dripping_headers(request: BaseHTTPRequestHandler) -> None:
    for _ in range(DRIPS):
        request.wfile.write(b"H")
        time.sleep(0.02)


ANSWERS: dict[str, Answer] = {
    "/a.png": lambda request: send(request, png()),
    "/page.png": lambda request: send(request, b"<html>not found</html>"),
    "/none.png": lambda request: send(request, b"", 404),
    "/packed.png": lambda request: send(request, gzip.compress(bytes(10_000_000)), Content_Encoding="gzip"),
    "/claims.png": lambda request: send(request, png(), Content_Length=str(10**12)),
    "/short.png": lambda request: send(request, png(), Content_Length=str(len(png()) + 5)),
    "/endless.png": endless,
    "/drip.png": dripping,
    "/drip-headers.png": dripping_headers,
    "/there.png": lambda request: send(request, b"", 302, Location="/a.png"),
    "/circle.png": lambda request: send(request, b"", 302, Location="/circle.png"),
    "/metadata.png": lambda request: send(request, b"", 302, Location="http://169.254.169.254/latest/meta-data/"),
    "/file.png": lambda request: send(request, b"", 302, Location="file:///etc/passwd"),
    "/nowhere.png": lambda request: send(request, b"", 302),
}


class Handler(BaseHTTPRequestHandler):
    seen: list[str]

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.seen.append(self.path)
        try:
            ANSWERS.get(self.path, lambda request: send(request, b"", 404))(self)
        except OSError:  # whoever asked has gone
            return


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    served = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"seen": seen}))
    served.daemon_threads = True
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}", seen
    served.shutdown()
    served.server_close()


@pytest.fixture
def policy(tmp_path: Path) -> UrlPolicy:
    return UrlPolicy(max_bytes=100_000, timeout_s=300.0, private=True, cache=str(tmp_path / "media"))


def test_urls_are_refused_unless_the_recipe_allows_them(server: tuple[str, list[str]], tmp_path: Path) -> None:
    with raises("media.url-not-allowed") as raised:
        probe(Part("image", f"{server[0]}/a.png"), tmp_path, Limits(), VideoSampling())
    assert "data.urls={}" in str(raised.value.fix)
    assert server[1] == []
    assert limits_of(build(DataSection, {}, "here")).urls is None
    section = build(DataSection, {"urls": {"hosts": ["example.org"], "timeout_s": 3, "cache": "x"}}, "here")
    assert limits_of(section).urls == UrlPolicy(("example.org",), timeout_s=3, cache="x")


def test_an_image_is_fetched_once(server: tuple[str, list[str]], policy: UrlPolicy, tmp_path: Path) -> None:
    limits, part = Limits(urls=policy), Part("image", f"{server[0]}/a.png")
    assert probe(part, tmp_path, limits, VideoSampling()).width == 6
    assert decode(part, tmp_path, limits, VideoSampling()).getpixel((0, 0)) == (255, 0, 0)
    assert server[1] == ["/a.png"]
    assert fetch_image(f"{server[0]}/there.png", policy).read_bytes() == png()
    for kind in ("video", "audio"):
        with raises("media.url-not-allowed"):
            probe(Part(kind, f"{server[0]}/a.png"), tmp_path, limits, VideoSampling())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("page", "media.not-an-image"),
        ("none", "media.download-failed 404"),
        ("packed", "media.download-failed"),
        ("claims", "media.download-failed 100000"),
        ("short", "media.download-failed"),
        ("endless", "media.download-failed 100000"),
        ("circle", "media.bad-redirect"),
        ("metadata", "media.private-address 169.254.169.254"),
        ("file", "media.bad-url"),
        ("nowhere", "media.download-failed 302"),
    ],
)
def test_what_a_server_may_not_do(server: tuple[str, list[str]], policy: UrlPolicy, path: str, error: str) -> None:
    with raises(error):
        fetch_image(f"{server[0]}/{path}.png", policy)
    assert not [file for file in Path(policy.cache).rglob("*") if file.is_file()]


@pytest.mark.parametrize("path", ["drip", "drip-headers"])
def test_a_slow_server_is_left_in_time(server: tuple[str, list[str]], policy: UrlPolicy, path: str) -> None:
    began = time.monotonic()
    with raises("media.download-failed", "0.3"):
        download(f"{server[0]}/{path}.png", replace(policy, timeout_s=0.3))
    assert time.monotonic() - began < 100  # the server would take 200 s


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "0x7f.1", "127.1", "[::ffff:127.0.0.1]", "[::]"],
)
def test_this_machine_is_not_asked(server: tuple[str, list[str]], policy: UrlPolicy, host: str) -> None:
    port = server[0].rpartition(":")[2]
    with raises("media.private-address"):
        download(f"http://{host}:{port}/a.png", replace(policy, private=False))
    assert server[1] == []


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        *((one, False, True) for one in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "::1")),
        *((one, False, True) for one in ("fd00::1", "::ffff:10.0.0.1", "2002:0a00:0001::1", "64:ff9b::a00:1")),
        *((one, False, False) for one in ("169.254.169.254", "fe80::1%eth0", "0.0.0.0", "224.0.0.1", "ff02::1", "::")),
        *((one, False, False) for one in ("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1")),
    ],
)
def test_which_addresses_are_asked(address: str, public: bool, private: bool) -> None:
    assert is_allowed(address, private=False) is public
    assert is_allowed(address, private=True) is private


def test_a_name_that_means_a_private_address_is_refused(policy: UrlPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_of_two(host: str, port: int, **_: Any) -> list[Any]:
        places = [("93.184.216.34", port), ("10.0.0.1", port)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", one_of_two)
    with raises("media.private-address", "images.example", "10.0.0.1"):
        download("http://images.example/a.png", replace(policy, private=False))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/a.png",
        "http:///a.png",
        "http://user:word@example.org/a.png",
        "http://example.org:99999/a.png",
        "http://exa\nmple.org/a.png",
        "http://[::1/a.png",
        f"http://example.org/{'a' * 5000}.png",
    ],
)
def test_urls_that_cannot_be_meant_are_refused(policy: UrlPolicy, url: str) -> None:
    with pytest.raises(TesseraError, match=r"not a URL|a user name or a password"):
        download(url, policy)


def test_an_image_that_was_kept_is_refused_where_its_host_no_longer_is_allowed(
    server: tuple[str, list[str]], policy: UrlPolicy
) -> None:
    here, by_name = server[0], server[0].replace("127.0.0.1", "localhost")
    ANSWERS["/to-name.png"] = lambda request: send(request, b"", 302, Location=f"{by_name}/a.png")
    for url in (f"{here}/a.png", f"{here}/to-name.png"):
        assert fetch_image(url, policy).read_bytes() == png()
        with raises("media.host-not-allowed", "data.urls.hosts"):
            fetch_image(url, replace(policy, hosts=("example.org",)))
        with raises("media.download-too-large", "10"):
            fetch_image(url, replace(policy, max_bytes=10))
    question = len(server[1])
    only = replace(policy, hosts=("127.0.0.1",))
    assert fetch_image(f"{here}/a.png", only).is_file()
    with raises("media.host-not-allowed", "data.urls.hosts"):  # a redirect led there
        fetch_image(f"{here}/to-name.png", only)
    assert len(server[1]) == question
    with raises("media.private-address"):  # it was fetched where private addresses were allowed
        fetch_image(f"{here}/a.png", replace(policy, private=False))


def test_only_named_hosts_are_asked(server: tuple[str, list[str]], policy: UrlPolicy) -> None:
    with raises("media.host-not-allowed", "127.0.0.1", "data.urls.hosts"):
        download(f"{server[0]}/a.png", replace(policy, hosts=("example.org",)))
    with raises("media.host-not-allowed", "data.urls.hosts"):
        download("http://evilexample.org/a.png", replace(policy, hosts=("example.org",)))
    assert server[1] == []
    assert download(f"{server[0]}/a.png", replace(policy, hosts=("127.0.0.1",)))[0] == png()


def test_samples_whose_image_cannot_be_fetched_are_listed(
    server: tuple[str, list[str]], policy: UrlPolicy, tmp_path: Path
) -> None:
    rows = [row("<image>What?", "Red.", images=[f"{server[0]}/{name}.png"], id=name) for name in ("a", "none", "page")]
    rows.append(row(f"<img>{server[0]}/a.png</img>", "Red.", id="tag"))
    section = SourceSection(path=write_jsonl(tmp_path / "rows.jsonl", rows))
    maker = IndexMaker(LetterProcessor(), 1000, Limits(urls=policy), "skip", tmp_path / "index", workers=0)
    index = maker.index([section])
    assert len(index.parts[0]) == 2
    codes = {bad.id: bad.code for bad in index.parts[0].bad}
    assert codes == {"none": "media.download-failed", "page": "media.not-an-image"}
    assert json.loads(json.dumps(index.identity))
