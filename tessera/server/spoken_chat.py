"""Spoken answers of chat completions (`modalities: ["text", "audio"]`), complete or as chunks of a stream."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tessera.inference.speech import Speech, SpeechSampling
from tessera.server.fields import AudioOutput, ChatRequest
from tessera.server.render import chat_chunks, chat_completion
from tessera.server.service import AnswerJob, Service
from tessera.server.speech import voice_of
from tessera.server.voice import Speak


async def spoken_completion(service: Service, job: AnswerJob, fields: ChatRequest) -> dict[str, Any]:
    """Return the body of a complete chat answer whose text is also spoken."""
    voice, output = voice_of(service), fields.audio or AudioOutput()
    body = await chat_completion(service, job, _with_tokens(fields))
    for number, choice in enumerate(body["choices"]):
        message = choice["message"]
        text = message["content"]
        if text:  # without text, the answer is empty or only calls tools: there is nothing to speak
            speech = await voice.say(await _work(service, job, number, fields, text, choice["token_ids"]))
            message["audio"] = {
                "id": _id(job, number),
                "data": _base64(speech.pcm() if output.format == "pcm16" else speech.wav()),
                "expires_at": int(time.time()),  # the server does not store it
                "transcript": text,
            }
            message["content"] = None
        _remove_tokens(choice, fields)
    _remove_tokens(body, fields)
    return body


async def spoken_chunks(service: Service, job: AnswerJob, fields: ChatRequest) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a streamed chat answer: its transcript while it is generated, then its sound."""
    voice = voice_of(service)
    texts, tokens = ["" for _ in job.requests], [list[int]() for _ in job.requests]
    ends: dict[int, dict[str, Any]] = {}  # the fields of each choice that end it
    head: dict[str, Any] = {}
    usage: dict[str, Any] | None = None
    async with aclosing(chat_chunks(service, job, _with_tokens(fields))) as chunks:
        async for chunk in chunks:
            if not chunk["choices"]:
                usage = chunk
                continue
            (choice,) = chunk["choices"]
            number, delta = choice["index"], choice["delta"]
            tokens[number] += choice.get("token_ids", [])
            if "content" in delta:
                texts[number] += delta["content"]
                delta["audio"] = {"id": _id(job, number), "transcript": delta.pop("content")}
            if choice["finish_reason"] is not None:
                ends[number] = {name: choice.pop(name) for name in ("finish_reason", "stop_reason")}
                choice["finish_reason"] = None
            _remove_tokens(choice, fields)
            _remove_tokens(chunk, fields)
            head = {name: value for name, value in chunk.items() if name not in ("choices", "prompt_token_ids")}
            yield chunk
    for number, end in sorted(ends.items()):
        if texts[number]:
            speak = await _work(service, job, number, fields, texts[number], tokens[number])
            async with aclosing(voice.stream(speak)) as parts:
                async for part in parts:
                    audio: dict[str, Any] = {"id": _id(job, number)}
                    audio |= {"expires_at": int(time.time())} if isinstance(part, Speech) else {"data": _base64(part)}
                    yield _chunk(head, number, {"audio": audio}, {"finish_reason": None})
        yield _chunk(head, number, {}, end)
    if usage is not None:
        yield usage


def _chunk(head: dict[str, Any], number: int, delta: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    return {**head, "choices": [{"index": number, "delta": delta, "logprobs": None, **end}]}


async def _work(
    service: Service, job: AnswerJob, number: int, fields: ChatRequest, text: str, tokens: Sequence[int]
) -> Speak:
    """Return the work of speaking an answer: its tokens, or those of its text if a part of them is not content."""
    output, request = fields.audio or AudioOutput(), job.requests[number]
    if service.tokens.decode(tokens) != text:
        tokens = await service.tokens_of(text, special=False)
    options = SpeechSampling(seed=request.sampling.seed, max_seconds=output.max_seconds)
    return voice_of(service).of_answer(service.engine, request, tokens, output.voice, options)


def _with_tokens(fields: ChatRequest) -> ChatRequest:
    return fields.model_copy(update={"return_token_ids": True})


def _remove_tokens(values: dict[str, Any], fields: ChatRequest) -> None:
    """Remove token ids that the request does not ask for."""
    if not fields.return_token_ids:
        values.pop("token_ids", None)
        values.pop("prompt_token_ids", None)


def _id(job: AnswerJob, number: int) -> str:
    return f"audio-{job.id}-{number}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
