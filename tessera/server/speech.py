"""The endpoint /v1/audio/speech: the speech of a text, complete or while it is generated."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tessera.inference.speech import SECONDS, TEMPERATURE, TOP_K, Speech, SpeechSampling, wav_header
from tessera.server.errors import ApiError
from tessera.server.fields import OpenAIBody, Seed
from tessera.server.guard import Admission
from tessera.server.service import Service
from tessera.server.streams import ByteStream, EventStream, first_of, in_time, while_connected
from tessera.server.voice import Speak, Voice

SPEECH = "/v1/audio/speech"
REFUSED = {
    "instructions": "this model reads no instructions about its voice",
    "stream": "set stream_format to audio or sse",
}
_LONGEST = 4096  # limit of the characters of a text to speak, as in OpenAI's API
_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}


class SpeechRequest(OpenAIBody):
    """Declare the body of /v1/audio/speech."""

    unsupported: ClassVar[Mapping[str, str]] = REFUSED

    input: str = Field(min_length=1, max_length=_LONGEST)
    model: str | None = None
    voice: str = Field("", max_length=256)
    response_format: Literal["wav", "pcm"] = "wav"
    speed: float = Field(1.0, ge=1, le=1, strict=False)
    stream_format: Literal["audio", "sse"] | None = None
    # Fields beyond OpenAI's API.
    temperature: float = Field(TEMPERATURE, ge=0, le=100, strict=False)
    top_k: int = Field(TOP_K, ge=0)
    top_p: float = Field(1.0, ge=0, le=1, strict=False)
    seed: Seed | None = None
    max_seconds: float = Field(SECONDS, gt=0, le=600, strict=False)

    @property
    def streams(self) -> bool:
        """Return whether sound is sent while it is generated. A WAV file is complete by default, with its length."""
        return self.stream_format is not None or self.response_format == "pcm"

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


async def speak_text(service: Service, admission: Admission, fields: SpeechRequest, request: Request) -> Response:
    """Answer /v1/audio/speech."""
    service.adapter_of(fields.model)
    voice = voice_of(service)
    speak = voice.of_text(fields.input, fields.voice, fields.options())
    settings = service.settings
    deadline = asyncio.get_running_loop().time() + settings.timeout_s
    kind = _TYPES[fields.response_format]
    if fields.streams:
        parts = in_time(_parts(voice, speak, admission, fields), deadline)
        first = await first_of(request.receive, parts)
        if fields.stream_format == "sse":
            return EventStream(first, settings.slow_client_s, end=b"")
        return ByteStream(first, settings.slow_client_s, kind)

    async def whole() -> Speech:
        async with asyncio.timeout_at(deadline):
            with admission.answers(1):
                return await voice.say(speak)

    speech = await while_connected(request.receive, whole())
    return Response(speech.wav() if fields.response_format == "wav" else speech.pcm(), media_type=kind)


async def _parts(voice: Voice, speak: Speak, admission: Admission, fields: SpeechRequest) -> AsyncGenerator[Any, None]:
    """Yield the sound as bytes, or as events. The first part begins with the header of a WAV file."""
    header = wav_header(voice.speaker.codec.rate) if fields.response_format == "wav" else b""
    with admission.answers(1):
        async with aclosing(voice.stream(speak)) as parts:
            async for part in parts:
                sound = header + (part if isinstance(part, bytes) else b"")
                header = b""
                if fields.stream_format != "sse":
                    yield sound
                    continue
                if sound:
                    yield {"type": "speech.audio.delta", "audio": base64.b64encode(sound).decode()}
                if isinstance(part, Speech):
                    yield {"type": "speech.audio.done", "usage": _usage(part)}


def _usage(speech: Speech) -> dict[str, int]:
    """Return the usage of a request: as input tokens, the positions before the speech; as output tokens, its frames."""
    prompt, frames = speech.prompt_tokens, len(speech.codes)
    return {"input_tokens": prompt, "output_tokens": frames, "total_tokens": prompt + frames}
