"""Fetch images that data names by http(s) URLs, where the recipe allows it (`data.urls`), and keep them by their hash.

URLs come from strangers. Every address of a host is checked before a connection, and the connection goes to the checked
address: a name that means another address a moment later changes nothing. Redirects are checked in the same way. A
server has a limited time and a limited number of bytes, whatever it sends. Proxies are not used.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import os
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

SCHEMES = ("http://", "https://")
_MAX_REDIRECTS = 5
_MAX_URL = 4096
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What counts as public by its number alone, and is not: local to a site, of protocols, of a cloud's own services.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("fec0::/10", "3fff::/20", "192.0.0.0/24", "168.63.129.16/32")))
_NOTE = ".json"  # beside a kept image: the URLs that led to it, where they are more than its own
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P4", b"P5", b"P6", b"P1", b"P2", b"P3")


@dataclass(frozen=True)
class UrlPolicy:
    """State what may be fetched."""

    hosts: tuple[str, ...] = ()  # these and their subdomains; none: all
    max_bytes: int = 32 << 20
    timeout_s: float = 20.0
    private: bool = False  # addresses of private networks and of this machine are allowed, too
    cache: str = ""  # folder; empty: that of the user


def is_url(value: object) -> bool:
    return isinstance(value, str) and value[:8].lower().startswith(SCHEMES)


def fetch_image(url: str, policy: UrlPolicy) -> Path:
    """Return the file that holds the image of a URL, fetched now or before. Raise `TesseraError` if it may not be
    fetched, or cannot be.

    A fetched image is judged by the policy of now: one of a host that is no longer allowed is refused.
    """
    _checked_url(url, policy)
    key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
    file = _cache_folder(policy) / key[:2] / key
    if file.is_file() and _is_still_allowed(file, url, policy):
        return file
    content, way = _followed(url, policy)
    if not _is_image(content):
        raise TesseraError(f"no image: {url:.200} ({len(content)} bytes of something else)", code="media.not-an-image")
    part = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = file.with_name(file.name + _NOTE)
        note.unlink(missing_ok=True)
        if policy.private or len(way) > 1:  # before the image: without it nothing is known of the way
            part.write_text(json.dumps({"urls": way, "private": policy.private}), encoding="utf-8")
            os.replace(part, note)
        part.write_bytes(content)
        os.replace(part, file)
    except OSError as error:
        raise TesseraError(
            f"a fetched image cannot be kept: {error.strerror}",
            where=str(file.parent),
            fix="set data.urls.cache",
            code="media.cache-not-writable",
        ) from None
    return file


def _is_still_allowed(file: Path, url: str, policy: UrlPolicy) -> bool:
    """Return whether a kept image need not be asked for again; raise where it may not be used."""
    if file.stat().st_size > policy.max_bytes:
        raise TesseraError(
            f"cannot be fetched: {url:.200} (more than {policy.max_bytes} bytes)", code="media.download-too-large"
        )
    try:
        record = json.loads(file.with_name(file.name + _NOTE).read_text(encoding="utf-8"))
        way, private = list(record["urls"]), bool(record["private"])
    except FileNotFoundError:  # it came from the host of the URL, at a public address
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    for place in way:
        _checked_url(str(place), policy)
    return policy.private or not private


def _cache_folder(policy: UrlPolicy) -> Path:
    if policy.cache:
        return Path(policy.cache)
    return user_cache("media")


def _is_image(content: bytes) -> bool:
    """Return whether bytes begin like an image, and not like the page of an error."""
    webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    return webp or content[4:12] in (b"ftypavif", b"ftypavis", b"ftypmif1") or content.startswith(_MAGIC)


def download(url: str, policy: UrlPolicy) -> bytes:
    """Return the content of a URL, within the limits of a policy."""
    return _followed(url, policy)[0]


def _followed(url: str, policy: UrlPolicy) -> tuple[bytes, list[str]]:
    """Return the content of a URL, and all URLs on the way to it, the first and the last included."""
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
            raise TesseraError(f"cannot be fetched: {at:.200} ({why})", code="media.download-failed") from None
        if isinstance(answer, bytes):
            return answer, way
        try:
            there = urljoin(at, answer)
        except ValueError as error:
            raise TesseraError(
                f"cannot be fetched: {at:.200} (it redirects to an invalid URL: {error})", code="media.bad-redirect"
            ) from None
        if at[:6].lower() == "https:" and there[:5].lower() == "http:":
            raise TesseraError(f"cannot be fetched: {at:.200} (it leads from https to http)", code="media.bad-redirect")
        at = there
    raise TesseraError(
        f"cannot be fetched: {url:.200} (more than {_MAX_REDIRECTS} redirects)", code="media.bad-redirect"
    )


def _checked_url(url: str, policy: UrlPolicy) -> SplitResult:
    """Return a URL in parts, or raise why it is not fetched."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise TesseraError(f"not a URL: {url:.200} ({error})", code="media.bad-url") from None
    if parts.scheme.lower() not in ("http", "https") or not host or len(url) > _MAX_URL or not url.isprintable():
        raise TesseraError(f"not a URL of http or https: {url:.200}", code="media.bad-url")
    if parts.username is not None or parts.password is not None:
        raise TesseraError(
            f"a URL with a user or a password: {parts.scheme}://...@{host:.200}", code="media.url-with-password"
        )
    below = any(host == one.lower() or host.endswith(f".{one.lower()}") for one in policy.hosts)
    if policy.hosts and not below:
        raise TesseraError(f"{host:.100} is none of data.urls.hosts: {url:.200}", code="media.host-not-allowed")
    return parts


def _addresses(host: str, port: int, policy: UrlPolicy) -> list[tuple[int, str]]:
    """Return the addresses of a host, all of which must be allowed."""
    try:
        name = host.encode("idna").decode("ascii") if not host.isascii() else host
        records = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OSError(f"no address of {host:.100}: {first_line(error)}") from None
    addresses = [(int(family), str(place[0])) for family, _, _, _, place in records]
    for _, address in addresses:
        if not is_allowed(address, policy.private):
            raise TesseraError(
                f"{host:.100} is {address}, which is no public address",
                fix="data.urls.private=true allows addresses of your own network, for data that you trust",
                code="media.private-address",
            )
    return addresses


def is_allowed(address: str, private: bool) -> bool:
    """Return whether a connection to an address may be made."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None = ipaddress.ip_address(address.partition("%")[0])
    assert ip is not None
    inner: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):  # it may stand for an address of version 4
        inner += [part for part in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())) if part is not None]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.ipv4_mapped is not None:
            inner.remove(ip)
    if any(part.is_multicast or part.is_unspecified or part.is_link_local for part in inner):
        return False  # the last one: services for the machine itself, such as a cloud's 169.254.169.254
    return private or all(
        part.is_global and not part.is_reserved and not any(part in network for network in _NOT_PUBLIC)
        for part in inner
    )


@contextmanager
def _connection(parts: SplitResult, policy: UrlPolicy, deadline: float) -> Iterator[http.client.HTTPConnection]:
    """Connect to a checked address. When the time is over the connection is cut, whatever the server is doing."""
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
    """Return the content, or the URL of a redirect."""
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?-._[]')}" if parts.query else ""
    )
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tessera", "Connection": "close"}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    if answer.status in _REDIRECTS and answer.headers.get("Location"):
        return str(answer.headers["Location"])
    if answer.status != 200:
        raise ValueError(f"the server answers {answer.status}")
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ValueError("its content is compressed, which was not asked for")
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
    if time.monotonic() >= deadline:  # a connection that was cut looks like the end of what has no length
        raise ValueError("too slow")
    if answer.length:
        raise ValueError(f"it ends {answer.length} bytes too early")
    return bytes(content)
