"""The page about the server: its calls of the official client run as they are printed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_docs_commands import ROOT, blocks

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

openai = pytest.importorskip("openai")

SOUND = b"\x01\x00\x02\x00"
DATA = base64.b64encode(SOUND).decode()
SERVED = {"csm-1b", "Qwen3-Omni-30B-A3B-Instruct", "whisper-large-v3-turbo"}  # the commands of the page start them
# The parts of a stream in the form of tessera/server/spoken_chat.py.
AUDIO: list[dict[str, Any]] = [{"id": "a", "transcript": "Goe"}, {"id": "a", "transcript": "the"}]
AUDIO += [{"id": "a", "data": DATA}, {"id": "a", "expires_at": 1}]
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def chat(request: Request) -> Response:
    body = await request.json()
    assert body["model"] in SERVED
    assert body["messages"][0]["role"] == "user"
    base = {"id": "c", "created": 1, "model": body["model"]}
    if not body.get("stream"):
        message = {
            "role": "assistant",
            "content": None,
            "audio": {"id": "a", "data": DATA, "expires_at": 1, "transcript": "Goethe"},
        }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({**base, "object": "chat.completion", "choices": [choice], "usage": USAGE})
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, *({"audio": audio} for audio in AUDIO), {}]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]

    def events() -> Iterator[str]:
        for choice in [*choices, []]:  # the last one has the usage and no choice
            yield f"data: {json.dumps({**base, 'object': 'chat.completion.chunk', 'choices': choice})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def speech(request: Request) -> Response:
    assert (await request.json())["model"] in SERVED
    return Response(SOUND)


async def transcriptions(request: Request) -> Response:
    body = await request.body()  # a form
    assert any(b"\r\n\r\n" + name.encode() + b"\r\n" in body for name in SERVED)
    return JSONResponse({"text": "Good evening."})


@pytest.mark.parametrize("page", ["serve.md", "serve.zh.md"])
def test_calls_of_the_client_run_as_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("talk.flac").write_bytes(SOUND)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/audio/speech", speech, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
    ]
    played: list[bytes] = []
    snippets = [text for text in blocks(ROOT / "docs" / "how-to" / page, "python") if "client.audio" in text]
    assert len(snippets) == 3
    with TestClient(Starlette(routes=routes), "http://localhost") as http:
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
        names = {"client": client, "base64": base64, "play": played.append}
        for text in snippets:
            exec(compile(text, page, "exec"), names)
    assert b"".join(played) == SOUND + SOUND
    assert capsys.readouterr().out == "Goethe"
    assert Path("hello.wav").read_bytes() == SOUND
