"""A server with a fake engine in a thread of the test, and commands for a person's actions on its chat page."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tessera.server.app import make_app
from tessera.server.service import Service
from tests.toys.browser import Browser


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve until the block ends, and return the address."""
    config = uvicorn.Config(make_app(service), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(20)
            service.close()


@dataclass
class ChatPage:
    """Act on the chat page as a person does."""

    browser: Browser

    def open(self, address: str, language: str = "en-US", width: int = 1000, dark: bool = False) -> None:
        agent = self.value("navigator.userAgent")
        self.browser.call("Network.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.call("Emulation.setEmulatedMedia", features=[scheme])
        self.browser.open(address, width=width)

    def value(self, expression: str) -> Any:
        return self.browser.value(expression)

    def until(self, expression: str) -> None:
        self.browser.wait(lambda: bool(self.value(expression)), 20.0)

    def models_are_listed(self, count: int = 1) -> None:
        self.until(f"document.querySelectorAll('#model option').length === {count}")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.value(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        self.browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Write into a field in place of what it holds."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.browser.call("Input.insertText", text=text)

    def choose_file(self, path: Path) -> None:
        root = self.browser.call("DOM.getDocument")["root"]["nodeId"]
        node = self.browser.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def ask(self, text: str) -> None:
        self.type("#question", text)
        self.press("Enter")

    def answered(self, count: int = 1) -> None:
        """Wait until this number of answers is complete."""
        done = ".answer[aria-busy=false]"
        self.until(f"document.querySelectorAll('{done}').length === {count} && !document.querySelector('.running')")
