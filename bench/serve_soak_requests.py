"""Requests of `serve_soak.py`: questions with right answers, and requests that a server must refuse."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ADAPTERS = ("first", "second")


@dataclass
class Question:
    """Hold a request and the answers that are right."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: list[Any] = field(default_factory=list)  # of an adapter that is replaced, several are right


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat_body(text: str, images: list[bytes], **body: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _url(data)}} for data in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **body}


def questions(pictures: list[bytes]) -> list[Question]:
    """Return questions of all kinds. Most have long sampled answers, so that no two are alike."""
    chance, items = random.Random(0), []
    for seed in range(12):
        long = {"seed": seed, "temperature": 1.3, "ignore_eos": True}
        word = "".join(chance.choices("abcdefghij ", k=chance.randrange(5, 200)))
        image, other = chance.sample(pictures, 2)
        digits = {"structured_outputs": {"regex": "[0-9]{12}"}}
        items += [
            Question("text", CHAT, chat_body(word, [], max_tokens=chance.randrange(8, 64), **long)),
            Question("image", CHAT, chat_body("What digit is this?", [image], temperature=0, max_tokens=8)),
            Question("sampled image", CHAT, chat_body("What digit is this?", [image], max_tokens=24, **long)),
            Question("two images", CHAT, chat_body("What is the sum?", [image, other], max_tokens=16, n=2, **long)),
            Question("logprobs", TEXT, {"prompt": word, "max_tokens": 12, "logprobs": 2, "echo": False, **long}),
            Question("constraint", CHAT, chat_body(word, [], seed=seed, temperature=1.0, max_tokens=32, **digits)),
            Question("response", RESPONSES, {"input": word, "max_output_tokens": 16, "temperature": 0, "store": False}),
        ]
        for name in ("base", *ADAPTERS):
            items.append(Question(name, CHAT, chat_body(word, [image], max_tokens=16, model=name, **long)))
    return items


def outcome(path: str, data: bytes) -> Any:
    """Return what must be equal in all answers to a question."""
    body = json.loads(data)
    if path == RESPONSES:
        return [body["status"], [part["text"] for item in body["output"] for part in item.get("content", [])]]
    texts = [
        [choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]]
        for choice in body["choices"]
    ]
    return [texts, body["usage"]["completion_tokens"]]


def streamed_outcome(data: bytes) -> Any:
    """Return the same of a stream of chat chunks. Raise if it has no end."""
    lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise EOFError("the stream has no end")
    texts: dict[int, list[Any]] = {}
    tokens = None
    for chunk in map(json.loads, lines[:-1]):
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        for choice in chunk["choices"]:
            entry = texts.setdefault(choice["index"], ["", None])
            entry[0] += choice["delta"].get("content") or ""
            entry[1] = choice["finish_reason"] or entry[1]
    return [[texts[index] for index in sorted(texts)], tokens]


def bad_requests(picture: bytes) -> list[tuple[str, str, bytes, set[int]]]:
    """Return requests that are refused: a name, path, body and the statuses that are right."""
    frames = [Image.new("P", (2000, 2000), number) for number in range(100)]
    animation, damaged = io.BytesIO(), bytearray(picture)
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:], duration=100)
    damaged[40:] = os.urandom(len(damaged) - 40)
    bomb = bytearray(picture)
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)

    def chat(**body: Any) -> bytes:
        return json.dumps(body).encode()

    def video(data: bytes) -> bytes:
        part = {"type": "video_url", "video_url": {"url": _url(data, "video/mp4")}}
        return chat(messages=[{"role": "user", "content": [part]}])

    user = [{"role": "user", "content": "hi"}]
    return [
        ("not json", CHAT, b'{"messages": [', {400}),
        ("damaged image", CHAT, chat(**chat_body("What?", [bytes(damaged)])), {400}),
        ("truncated image", CHAT, chat(**chat_body("What?", [picture[: len(picture) // 2]])), {400}),
        ("image bomb", CHAT, chat(**chat_body("What?", [bytes(bomb)])), {400}),
        ("long animation", CHAT, video(animation.getvalue()), {400}),
        ("no video", CHAT, video(os.urandom(3000)), {400}),
        ("unknown model", CHAT, chat(messages=user, model="other"), {404}),
        ("wrong field", CHAT, chat(messages=user, temperature=-1), {400}),
        ("too long", CHAT, chat(messages=[{"role": "user", "content": "one " * 9000}]), {400}),
        ("exploding regex", CHAT, chat(messages=user, structured_outputs={"regex": "(a{1,900}){900}b{900}"}), {400}),
        ("no route", "/v1/nothing", b"{}", {404}),
        ("traversal", "/v1/load_lora_adapter", chat(lora_name="x", lora_path="../../etc"), {400}),
    ]
