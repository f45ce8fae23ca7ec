"""A ModelScope of this machine: the answers that its library asks for when a model is pushed, over HTTP on loopback."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class ModelScopeServer:
    url: str
    token: str = "good"
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # by sha256
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # of commits


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelScopeServer

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.token not in f"{self.headers.get('Authorization')} {self.headers.get('Cookie')}":
            self.tell({"Code": 401, "Message": "no token", "Success": False, "success": False}, 401)
        elif path.endswith("/users/me"):
            self.tell({"success": True, "data": {"username": "me"}, "Data": {"Username": "me"}})
        elif match := re.fullmatch(r"/blob/(\w+)", path):
            self.hub.blobs[match[1]] = content
            self.tell({"Success": True, "Code": 200})
        elif match := re.fullmatch(r"/api/v1/repos/models/([^/]+/[^/]+)/info/lfs/objects/batch", path):
            request = json.loads(content)["objects"]
            url = self.hub.url
            self.data({"objects": [{**o, "actions": {"upload": {"href": f"{url}/blob/{o['oid']}"}}} for o in request]})
        elif match := re.fullmatch(r"/api/v1/repos/models/([^/]+/[^/]+)/commit/\w+", path):
            self.commit(match[1], json.loads(content))
        elif self.command == "POST" and path == "/api/v1/models":
            request = json.loads(content)
            name = f"{request['Path']}/{request['Name']}"
            if name in self.hub.models:  # every upload asks for it
                self.tell({"Code": 10010101001, "Message": "the model exists", "Success": False}, 400)
                return
            self.hub.models[name], self.hub.private[name] = {}, request.get("Visibility") == 1
            self.data({"Name": name})
        elif (match := re.search(r"/models/([^/]+/[^/]+)(/repo/files)?$", path)) and match[1] in self.hub.models:
            files = [{"Path": n, "Type": "blob", "Size": len(c)} for n, c in self.hub.models[match[1]].items()]
            private = self.hub.private[match[1]]
            about = {"Files": files} if match[2] else {"Visibility": 1 if private else 5, "private": private}
            self.tell({"success": True, "data": about, "Success": True, "Code": 200, "Data": about})
        else:
            self.tell({"Code": 404, "Message": "not found", "Success": False, "success": False}, 404)

    def commit(self, name: str, request: dict[str, Any]) -> None:
        self.hub.messages.append(request["commit_message"])
        for action in request["actions"]:
            large = action["type"] == "lfs"
            content_of_blob = self.hub.blobs[action["sha256"]] if large else base64.b64decode(action["content"])
            self.hub.models[name][action["path"]] = content_of_blob
        self.data({"CommitId": "1" * 40})

    def data(self, content: Any) -> None:
        self.tell({"Success": True, "Code": 200, "Data": content})

    def tell(self, content: Any, status: int = 200) -> None:
        written = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)


@contextmanager
def modelscope_server() -> Iterator[ModelScopeServer]:
    hub = ModelScopeServer("")
    served = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    served.daemon_threads = True
    hub.url = f"http://127.0.0.1:{served.server_address[1]}"
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        served.shutdown()
        served.server_close()
