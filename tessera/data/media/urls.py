"""Download images by http(s) URL, if the recipe allows it (`data.urls`), and cache them by the hash of the URL.

URLs in data are not trusted. All addresses of a host are checked, and the connection goes to a checked address, so a
second DNS answer cannot change it. Redirects are checked in the same way. Time and size of a download are limited.
Proxies are not used.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from tessera.data.cache import user_cache
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import replacing

SCHEMES = ("http://", "https://")
_MAX_REDIRECTS = 5
_MAX_URL = 4096
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Networks that are not public, although Python's `is_global` is true: site-local, documentation, protocols, Azure.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("fec0::/10", "3fff::/20", "192.0.0.0/24", "168.63.129.16/32")))
# Suffix of a file beside a cached image. It contains the URLs of the image's redirects, and whether any was private.
_NOTE = ".json"
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P4", b"P5", b"P6", b"P1", b"P2", b"P3")


@dataclass(frozen=True)
class UrlPolicy:
    """State which URLs may be downloaded."""

    hosts: tuple[str, ...] = ()  # allowed hosts, including subdomains; empty: all
    max_bytes: int = 32 << 20
    timeout_s: float = 20.0
    private: bool = False  # also allow addresses of private networks and of this machine
    cache: str = ""  # folder for images; empty: the user's cache


def is_url(value: object) -> bool:
    return isinstance(value, str) and value[:8].lower().startswith(SCHEMES)


def fetch_image(url: str, policy: UrlPolicy) -> Path:
    """Return the cached file of an image URL. Download it if it is not in the cache.

    The current policy also applies to cached images: an image of a host that is no longer allowed is refused.
    """
    _checked_url(url, policy)
    key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
    file = (Path(policy.cache) if policy.cache else user_cache("media")) / key[:2] / key
    if file.is_file() and _is_still_allowed(file, url, policy):
        return file
    content, way = download(url, policy)
    if not _is_image(content):
        raise TesseraError(f"not an image: {url:.200} ({len(content)} bytes)", code="media.not-an-image")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = file.with_name(file.name + _NOTE)
        note.unlink(missing_ok=True)
        if policy.private or len(way) > 1:  # written before the image: a cached image without a note counts as public
            with replacing(note) as fresh:
                fresh.write_text(json.dumps({"urls": way, "private": policy.private}), encoding="utf-8")
        with replacing(file) as fresh:
            fresh.write_bytes(content)
    except OSError as error:
        raise TesseraError(
            f"a downloaded image cannot be written: {error.strerror}",
            where=str(file.parent),
            fix="set data.urls.cache to a writable folder",
            code="media.cache-not-writable",
        ) from None
    return file


def _is_still_allowed(file: Path, url: str, policy: UrlPolicy) -> bool:
    """Return whether a cached image can be used without a new download. Raise if the policy forbids it."""
    if file.stat().st_size > policy.max_bytes:
        raise TesseraError(
            f"image too large: {url:.200} (more than {policy.max_bytes} bytes)",
            fix="make the image smaller, or raise data.urls.max_bytes",
            code="media.download-too-large",
        )
    try:
        record = json.loads(file.with_name(file.name + _NOTE).read_text(encoding="utf-8"))
        way, private = list(record["urls"]), bool(record["private"])
    except FileNotFoundError:  # no note: no redirect, and private addresses were not allowed
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    for followed in way:
        _checked_url(str(followed), policy)
    return policy.private or not private


def _is_image(content: bytes) -> bool:
    """Return whether content begins with the signature of an image format."""
    webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    return webp or content[4:12] in (b"ftypavif", b"ftypavis", b"ftypmif1") or content.startswith(_MAGIC)


def download(url: str, policy: UrlPolicy) -> tuple[bytes, list[str]]:
    """Return the content of a URL within the limits of the policy, and all URLs from the first to the last redirect."""
    deadline, at = time.monotonic() + policy.timeout_s, url
    way: list[str] = []
    for _ in range(_MAX_REDIRECTS + 1):
        way.append(at)
        parts = _checked_url(at, policy)
        try:
            with _connection(parts, policy, deadline) as connection:
                answer = _ask(connection, parts, policy, deadline)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            slow = time.monotonic() >= deadline
            why = f"took longer than {policy.timeout_s:g} s" if slow else first_line(error)
            raise TesseraError(f"download failed: {at:.200} ({why})", code="media.download-failed") from None
        if isinstance(answer, bytes):
            return answer, way
        try:
            there = urljoin(at, answer)
        except ValueError as error:
            raise TesseraError(
                f"download failed: {at:.200} (redirect to an invalid URL: {error})", code="media.bad-redirect"
            ) from None
        if at[:6].lower() == "https:" and there[:5].lower() == "http:":
            raise TesseraError(f"download failed: {at:.200} (redirect from https to http)", code="media.bad-redirect")
        at = there
    raise TesseraError(f"download failed: {url:.200} (more than {_MAX_REDIRECTS} redirects)", code="media.bad-redirect")


def _checked_url(url: str, policy: UrlPolicy) -> SplitResult:
    """Return the parts of a URL. Raise if the URL is invalid or not allowed."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise TesseraError(
            f"not a URL: {url:.200} ({error})",
            fix="write a URL that begins with http:// or https://",
            code="media.bad-url",
        ) from None
    if parts.scheme.lower() not in ("http", "https") or not host or len(url) > _MAX_URL or not url.isprintable():
        raise TesseraError(
            f"not a URL of http or https: {url:.200}",
            fix="write a URL that begins with http:// or https://",
            code="media.bad-url",
        )
    if parts.username is not None or parts.password is not None:
        raise TesseraError(
            f"the URL contains a user name or a password: {parts.scheme}://...@{host:.200}",
            fix="remove the user name and the password from the URL",
            code="media.url-with-password",
        )
    below = any(host == name.lower() or host.endswith(f".{name.lower()}") for name in policy.hosts)
    if policy.hosts and not below:
        raise TesseraError(
            f"{host:.100} is not in data.urls.hosts: {url:.200}",
            fix="add the host to data.urls.hosts if you trust it",
            code="media.host-not-allowed",
        )
    return parts


def _addresses(host: str, port: int, policy: UrlPolicy) -> list[tuple[int, str]]:
    """Return all addresses of a host. Raise if any of them is not allowed."""
    try:
        name = host.encode("idna").decode("ascii") if not host.isascii() else host
        records = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OSError(f"no address of {host:.100}: {first_line(error)}") from None
    addresses = [(int(family), str(address[0])) for family, _, _, _, address in records]
    for _, address in addresses:
        if not is_allowed(address, policy.private):
            raise TesseraError(
                f"{host:.100} has the address {address}, which is not public",
                fix="set data.urls.private=true to allow private addresses, if you trust the data",
                code="media.private-address",
            )
    return addresses


def is_allowed(address: str, private: bool) -> bool:
    """Return whether an IP address may be connected to. `private`: addresses of private networks are allowed."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None = ipaddress.ip_address(address.partition("%")[0])
    assert ip is not None
    inner: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):  # an IPv4 address may be embedded in it, and is checked as well
        inner += [part for part in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())) if part is not None]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.ipv4_mapped is not None:
            inner.remove(ip)
    if any(part.is_multicast or part.is_unspecified or part.is_link_local for part in inner):
        return False  # link-local addresses include the metadata service of clouds, 169.254.169.254
    return private or all(
        part.is_global and not part.is_reserved and not any(part in network for network in _NOT_PUBLIC)
        for part in inner
    )


@contextmanager
def _connection(parts: SplitResult, policy: UrlPolicy, deadline: float) -> Iterator[http.client.HTTPConnection]:
    """Connect to a checked address. A timer closes the connection at the deadline, whatever the server sends."""
    host, secure = str(parts.hostname), parts.scheme.lower() == "https"
    port = parts.port or (443 if secure else 80)
    connection = http.client.HTTPConnection(host, port)
    sock = _connected(_addresses(host, port, policy), port, deadline)
    timer: threading.Timer | None = None
    try:
        if secure:
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (sock,))
        timer.daemon = True
        timer.start()
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection.sock = sock
        yield connection
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()
        sock.close()


def _connected(addresses: list[tuple[int, str]], port: int, deadline: float) -> socket.socket:
    problem: OSError = OSError("no address")
    for family, address in addresses[:4]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(remaining)
        try:
            sock.connect((address, port))
            return sock
        except OSError as error:
            problem = error
            sock.close()
    raise problem


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _ask(connection: http.client.HTTPConnection, parts: SplitResult, policy: UrlPolicy, deadline: float) -> bytes | str:
    """Send the request. Return the content as bytes, or the target of a redirect as text."""
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?-._[]')}" if parts.query else ""
    )
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tessera", "Connection": "close"}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    if answer.status in _REDIRECTS and answer.headers.get("Location"):
        return str(answer.headers["Location"])
    if answer.status != 200:
        raise ValueError(f"the server returned status {answer.status}")
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ValueError("the server's response is compressed, which was not requested")
    too_large = f"more than {policy.max_bytes} bytes"
    if (answer.length or 0) > policy.max_bytes:
        raise ValueError(too_large)
    content = bytearray()
    while chunk := answer.read1(_CHUNK):
        content += chunk
        if len(content) > policy.max_bytes:
            raise ValueError(too_large)
        if time.monotonic() >= deadline:
            break
    if time.monotonic() >= deadline:  # a connection that the timer closed looks like the end of the content
        raise ValueError("too slow")
    if answer.length:
        raise ValueError(f"the server's response ends {answer.length} bytes too early")
    return bytes(content)
