"""Speech: the endpoint /v1/audio/speech, and spoken answers of chat completions (`modalities: ["text", "audio"]`)."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tessera.inference.speech import SECONDS, TEMPERATURE, TOP_K, Speech, SpeechSampling
from tessera.server.content import chat_messages
from tessera.server.errors import ApiError
from tessera.server.fields import AudioOutput, ChatRequest, Seed
from tessera.server.messages import Body
from tessera.server.render import chat_completion
from tessera.server.service import AnswerJob, Service
from tessera.server.streams import while_connected
from tessera.server.voice import Voice

SPEECH = "/v1/audio/speech"
REFUSED = {
    "instructions": "this model reads no instructions about its voice",
    "stream": "speech is sent when it is complete",
}
_LONGEST = 4096  # characters of a text to speak, as in OpenAI's API
_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}


class SpeechRequest(Body):
    """Declare the body of /v1/audio/speech."""

    input: str = Field(min_length=1, max_length=_LONGEST)
    model: str | None = None
    voice: str = Field("", max_length=256)
    response_format: Literal["wav", "pcm"] = "wav"
    speed: float = Field(1.0, ge=1, le=1, strict=False)
    stream_format: Literal["audio"] = "audio"
    # Fields beyond OpenAI's API.
    temperature: float = Field(TEMPERATURE, ge=0, le=100, strict=False)
    top_k: int = Field(TOP_K, ge=0)
    top_p: float = Field(1.0, ge=0, le=1, strict=False)
    seed: Seed | None = None
    max_seconds: float = Field(SECONDS, gt=0, le=600, strict=False)

    def options(self) -> SpeechSampling:
        seed = secrets.randbits(62) if self.seed is None else self.seed & ((1 << 63) - 1)
        return SpeechSampling(self.temperature, self.top_k, self.top_p, seed, self.max_seconds)


def voice_of(service: Service) -> Voice:
    """Return the voice of the served model. Raise if it does not speak."""
    if service.voice is None:
        raise ApiError(
            400,
            f"the model {service.settings.name} writes text and does not speak: serve a model that speaks",
            param="model",
            code="model_does_not_speak",
        )
    return service.voice


class SpeechApi:
    """Answer /v1/audio/speech."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, fields: SpeechRequest, request: Request) -> Response:
        self._service.adapter_of(fields.model)
        voice = voice_of(self._service)
        messages = [{"role": "assistant", "content": fields.input}]
        deadline = asyncio.get_running_loop().time() + self._service.settings.timeout_s

        async def speak() -> Speech:
            async with asyncio.timeout_at(deadline):
                return await voice.say(messages, fields.voice, fields.options())

        speech = await while_connected(request.receive, speak())
        content = speech.wav() if fields.response_format == "wav" else speech.pcm()
        return Response(content, media_type=_TYPES[fields.response_format])


async def spoken_completion(service: Service, job: AnswerJob, fields: ChatRequest) -> dict[str, Any]:
    """Return the body of a complete chat answer whose text is also spoken."""
    voice = voice_of(service)
    body = await chat_completion(service, job, fields)
    output = fields.audio or AudioOutput()
    messages = _texts(chat_messages(fields.messages, (), service.settings, continues=True))
    for number, choice in enumerate(body["choices"]):
        message = choice["message"]
        text = message["content"]
        if not text:  # the answer is a call of a tool
            continue
        seed = job.requests[number].sampling.seed
        conversation = [*messages, {"role": "assistant", "content": text}]
        speech = await voice.say(conversation, output.voice, SpeechSampling(seed=seed, max_seconds=output.max_seconds))
        message["audio"] = {
            "id": f"audio-{job.id}-{number}",
            "data": base64.b64encode(speech.wav() if output.format == "wav" else speech.pcm()).decode(),
            "expires_at": int(time.time()),  # the server does not store it
            "transcript": text,
        }
        message["content"] = None
    return body


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without their media: the talker reads the texts of a conversation."""
    return [
        {"role": message["role"], "content": [part for part in message["content"] if part["type"] == "text"]}
        for message in messages
    ]
