"""Render chat templates in a separate process with limits of time, memory and output."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.models.transformers import render_process

# Limit of the characters that a template writes in addition to `_MOST_TIMES` x the messages' length.
_MOST_CHARACTERS = 1 << 20
_MOST_TIMES = 16  # a template may also write this many characters per character of the messages
_SECONDS = 5.0  # time limit in CPU seconds, so that other processes do not shorten it
_ATTEMPTS = 2  # retry once: another program may have killed the process


class TemplateLimit(TesseraError):
    """Report a chat template that exceeds its limits of time, memory or output."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    special: Mapping[str, str],
    *,
    answer: bool = False,
    where: str = "chat_template",
) -> str:
    """Return a conversation rendered like `apply_chat_template` of transformers.

    `special`: special tokens by name. `answer`: add the generation prompt. `where`: name of the template in errors.
    """
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answer, **special}
    characters = sum(len(str(message["content"])) for message in messages)
    request = {"template": template, "variables": variables, "seconds": _SECONDS}
    request["most"] = _MOST_CHARACTERS + _MOST_TIMES * characters
    reply = _process_of(os.getpid()).ask(json.dumps(request, default=lambda value: f"<{type(value).__name__}>"))
    if "text" in reply:
        return reply["text"]
    if "error" in reply:
        raise TesseraError(
            f"the folder's chat template raised an error for this conversation: {reply['error'].splitlines()[0]}",
            fix="correct the conversation, or the chat template of the folder",
            code="tokenizer.template-refuses",
        )
    raise TemplateLimit(
        f"the folder's chat template {reply['limit']} for one conversation",
        where=where,
        fix="use the published chat template of the model",
        code="tokenizer.template-limit",
    )


class _RenderProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, request: str) -> dict[str, str]:
        with self._lock:
            for _ in range(_ATTEMPTS):
                process = self._process = self._process or _start()
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    process.stdin.write(f"{request}\n".encode())
                    process.stdin.flush()
                    line = process.stdout.readline()
                except BrokenPipeError:
                    line = b""
                if line.endswith(b"\n"):
                    reply: dict[str, str] = json.loads(line)
                    return reply
                code = self.close()
                if code == -signal.SIGPROF:
                    return {"limit": "takes too long"}
            return {"limit": f"ends the process that renders it (exit code {code})"}

    def close(self) -> int | None:
        process, self._process = self._process, None
        return None if process is None else _end(process)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(render_process.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def _end(process: subprocess.Popen[bytes]) -> int:
    with process:  # the end of the block closes the pipes, so that the process ends, and waits for that
        pass
    return process.returncode


@functools.cache
def _process_of(process: int) -> _RenderProcess:
    """Return the renderer of the process with this id: a forked child must not use the pipes of its parent."""
    return _RenderProcess()
