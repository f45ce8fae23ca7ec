"""A hub of this machine: the answers that huggingface_hub asks for, over HTTP on the loopback address, with faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1000  # bytes from which a file is a large one, with a sha256


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    faults: dict[str, str] = field(default_factory=dict)  # by file: truncated, altered, slow, error, gone, endless
    commits: list[dict[str, Any]] = field(default_factory=list)  # what was pushed
    private: bool = False

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()


@dataclass
class HubServer:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)  # org/name, datasets/org/name
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=lambda: {"good"})
    uploads: dict[str, bytes] = field(default_factory=dict)
    on_request: Callable[[str], None] = str  # called with each request, and once more in the middle of each file

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> Repository:
        self.repositories[name] = Repository(files, **settings)
        return self.repositories[name]

    def downloads(self) -> list[str]:
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line]


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def entry(name: str, content: bytes, key: str) -> dict[str, Any]:
    results: dict[str, Any] = {key: name, "type": "file", "size": len(content), "blobId": git_sha1(content)}
    results["oid"] = results["blobId"]
    if len(content) >= LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        results["lfs"] = {"size": len(content), "sha256": sha256, "oid": sha256, "pointerSize": 130}
    return results


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.on_request(f"{self.command} {path}")
        content = self.body()
        if path == "/api/whoami-v2":
            self.tell({"name": "me", "type": "user"}) if self.has_token() else self.refuse(401, None)
        elif path == "/api/validate-yaml":
            self.tell({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            request = json.loads(content)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            existing = name in self.hub.repositories
            if not self.has_token():
                self.refuse(401, None)
            elif existing:
                self.tell({"error": "exists", "url": f"{self.hub.url}/{name}"}, status=409)
            else:
                self.hub.add(name, {}, private=bool(request.get("private") or request.get("visibility") == "private"))
                self.tell({"url": f"{self.hub.url}/{name}", "name": name})
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path):
            self.take(match[2], match[3], content)
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(content))
        elif match := re.fullmatch(r"/upload/(\w+)", path):
            self.hub.uploads[match[1]] = content
            self.tell({})
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            kind = "datasets/" if match[1] == "datasets" else ""
            self.describe(f"{kind}{match[2]}", match[3], match[4] or "main")
        elif match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.give(match[1], match[2], match[3])
        else:
            self.refuse(404, None)

    def repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.has_token()):
            self.refuse(401 if not self.has_token() else 404, "RepoNotFound")
        elif revision not in ("main", repository.commit):
            self.refuse(404, "RevisionNotFound")
        else:
            return repository
        return None

    def has_token(self) -> bool:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") in self.hub.tokens

    def describe(self, name: str, what: str | None, revision: str) -> None:
        repository = self.repository(name, revision)
        if repository is None:
            return
        if what == "tree":
            self.tell([entry(file, content, "path") for file, content in repository.files.items()])
            return
        files = [entry(file, content, "rfilename") for file, content in repository.files.items()]
        self.tell({"id": name, "sha": repository.commit, "siblings": files, "tags": [], "private": repository.private})

    def give(self, name: str, revision: str, file: str) -> None:
        repository = self.repository(name, revision)
        if repository is None:
            return
        if repository.gated and not self.has_token():
            self.refuse(401, "GatedRepo")
            return
        if file not in repository.files or repository.faults.get(file) == "gone":
            self.refuse(404, "EntryNotFound")
            return
        content, fault = repository.files[file], repository.faults.get(file)
        if fault == "error" and self.command == "GET":
            self.refuse(500, None)
            return
        etag = hashlib.sha256(content).hexdigest() if len(content) >= LARGE else git_sha1(content)
        sent = bytes(len(content)) if fault == "altered" else content
        first = 0
        if ranged := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(ranged[1])
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("ETag", f'"{etag}"')
        if fault == "endless" and self.command == "GET":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.send_without_end()
            return
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command != "GET":
            return
        if fault == "truncated":
            self.wfile.write(sent[first : first + (len(content) - first) // 2])
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(0.3)
        half = (first + len(sent)) // 2
        self.wfile.write(sent[first:half])
        self.wfile.flush()
        self.hub.on_request(f"half of {file}")
        with suppress(OSError):  # whoever asked may have been killed
            self.wfile.write(sent[half:])

    def send_without_end(self) -> None:
        chunk = bytes(1 << 14)
        with suppress(OSError):  # until nobody listens any more
            for _ in range(1 << 12):  # 64 MiB: a client that takes all of it has no bound
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def take(self, name: str, step: str, content: bytes) -> None:
        if not self.has_token():
            self.refuse(401, None)
        elif step == "preupload":
            files = json.loads(content)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self.tell({"files": modes})
        else:
            lines = [json.loads(line) for line in content.splitlines() if line.strip()]
            self.hub.repositories[name].commits += lines
            url = f"{self.hub.url}/{name}/commit/{'0' * 40}"
            self.tell({"commitUrl": url, "commitOid": "0" * 40, "success": True})

    def batch(self, request: dict[str, Any]) -> None:
        objects = [
            {**first, "actions": {"upload": {"href": f"{self.hub.url}/upload/{first['oid']}", "header": {}}}}
            for first in request["objects"]
        ]
        self.tell({"transfer": "basic", "objects": objects})

    def tell(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("OwnHandler", (Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
