"""The endpoint of /v1/audio/transcriptions, on top of a function that answers chat completions."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tessera.data.media.audio import AudioSampling, probe
from tessera.data.media.files import Limits, Opened
from tessera.errors import TesseraError
from tessera.models.processing.transcription import Transcriber
from tessera.server.errors import ApiError, of_tessera, of_validation
from tessera.server.messages import Body, Text
from tessera.server.multipart import FormPart, read_form
from tessera.server.streams import RunChat

TRANSCRIPTIONS = "/v1/audio/transcriptions"
_REFUSED = {
    "chunking_strategy": "cut the recording into shorter ones",
    "include[]": "ask /v1/chat/completions for logprobs",
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
    "stream": "ask /v1/chat/completions for a stream, with input_audio",
}
_MOST_BYTES = 48 << 20  # limit of an audio file, whose base64 text is limited to 64 MiB
_TICKS = 1000  # per second: `duration` is exact to a millisecond
_LONGEST_S = 1e9  # no limit: that of the model was checked before
_STAMP = re.compile(r"<\|(\d{1,6}(?:\.\d{1,3})?)\|>")


class TranscriptionRequest(Body):
    """Declare the fields of /v1/audio/transcriptions, except the file."""

    model: str | None = None
    language: str | None = Field(None, pattern=r"^[A-Za-z-]{2,32}$")
    prompt: Text | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=100, strict=False)
    granularities: Literal["segment"] | None = Field(None, alias="timestamp_granularities[]")

    @property
    def timed(self) -> bool:
        """Return whether the format has time stamps."""
        return self.response_format in ("verbose_json", "srt", "vtt")


@dataclass(frozen=True)
class Segment:
    """Hold a part of a transcript with its start and end in seconds."""

    start: float
    end: float
    text: str


async def transcribe(run_chat: RunChat, transcriber: Transcriber, body: bytes, request: Request) -> Response:
    """Answer /v1/audio/transcriptions. `body`: of the request, within the limits."""
    form = read_form(body, request.headers.get("content-type", ""))
    fields = _fields_of(form)
    result = await run_chat(_chat_of(transcriber, fields, form["file"]), request)
    assert isinstance(result, dict), "the chat completion is not streamed"
    answer, language = transcriber.transcript(str(result["choices"][0]["message"]["content"] or ""))
    if fields.response_format == "json":
        usage = result["usage"]
        counts = {
            "type": "tokens",
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
        }
        return JSONResponse({"text": plain_text(answer), "usage": counts})
    if fields.response_format == "text":
        return PlainTextResponse(plain_text(answer) + "\n")
    segments = segments_of(answer)
    if fields.response_format != "verbose_json":
        return PlainTextResponse(subtitles(segments, fields.response_format))
    listed = [
        {"id": number, "start": segment.start, "end": segment.end, "text": segment.text}
        for number, segment in enumerate(segments)
    ]
    duration = await asyncio.to_thread(_seconds_of, bytes(form["file"].content))
    head = {"task": "transcribe", "language": fields.language or language or "", "duration": duration}
    return JSONResponse({**head, "text": plain_text(answer), "segments": listed})


def _chat_of(transcriber: Transcriber, fields: TranscriptionRequest, file: FormPart) -> dict[str, Any]:
    """Return the body of the chat completion that transcribes a file."""
    try:
        text = transcriber.transcription_instruction(fields.language, fields.prompt, fields.timed)
    except TesseraError as error:
        raise of_tessera(error) from None
    url = f"data:application/octet-stream;base64,{base64.b64encode(file.content).decode()}"
    parts = [{"type": "audio_url", "audio_url": url}, *([{"type": "text", "text": text}] if text else [])]
    return {
        "model": fields.model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": fields.temperature,
        "skip_special_tokens": not fields.timed,
    }


def _fields_of(form: Mapping[str, FormPart]) -> TranscriptionRequest:
    """Return the fields of a form. Raise for unknown, unsupported and wrong fields, and if the file is missing."""
    file = form.get("file")
    if file is None or file.filename is None:
        raise ApiError(400, "the form has no file", param="file", code="invalid_value")
    if not len(file.content):
        raise ApiError(400, "the file is empty", param="file", code="invalid_value")
    if len(file.content) > _MOST_BYTES:
        raise ApiError(413, f"the file is larger than {_MOST_BYTES} bytes", param="file", code="request_too_large")
    values = {name: part.text(name) for name, part in form.items() if name != "file"}
    if values.get("stream", "").lower() in ("", "false"):
        values.pop("stream", None)
    try:
        return TranscriptionRequest.model_validate({name: value for name, value in values.items() if value})
    except ValidationError as error:
        raise of_validation(error, _REFUSED, TranscriptionRequest.model_fields) from None


def _seconds_of(recording: bytes) -> float:
    """Return the length of a recording, which was decoded before."""
    size = probe(Opened(io.BytesIO(recording), "the file"), Limits(), AudioSampling(_TICKS, max_seconds=_LONGEST_S))
    return size.samples / _TICKS


# ---------------------------------------------------------------------------------------------- time stamps


def plain_text(answer: str) -> str:
    """Return a transcript without time stamps."""
    return _STAMP.sub("", answer).strip()


def segments_of(answer: str) -> list[Segment]:
    """Return the parts of a transcript between time stamps, such as <|0.00|> Hello.<|1.52|>. Raise if it has none."""
    pieces = _STAMP.split(answer)
    stamps, texts = [float(stamp) for stamp in pieces[1::2]], pieces[2::2]
    segments = [
        Segment(stamps[number], max(stamps[number], stamps[min(number + 1, len(stamps) - 1)]), text.strip())
        for number, text in enumerate(texts)
        if text.strip()
    ]
    if not segments:
        raise ApiError(
            400,
            "the model wrote no time stamps: use the format json or text",
            param="response_format",
            code="no_time_stamps",
        )
    return segments


def subtitles(segments: list[Segment], form: Literal["srt", "vtt"]) -> str:
    """Return segments in the format of SubRip or WebVTT."""
    blocks = ["WEBVTT\n\n"] if form == "vtt" else []
    for number, segment in enumerate(segments, 1):
        start, end = (_clock(seconds, "," if form == "srt" else ".") for seconds in (segment.start, segment.end))
        # A blank line would end the subtitle, and an arrow would begin the next one.
        text = "\n".join(line for line in segment.text.splitlines() if line.strip()).replace("-->", "->")
        blocks.append((f"{number}\n" if form == "srt" else "") + f"{start} --> {end}\n{text}\n\n")
    return "".join(blocks)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
