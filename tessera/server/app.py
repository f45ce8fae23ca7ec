"""The endpoints of the server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tessera.server.body import read_object
from tessera.server.errors import ApiError, of_validation
from tessera.server.fields import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    OpenAIBody,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from tessera.server.guard import Admission, RequestGuard, error_response
from tessera.server.messages import Body
from tessera.server.page_routes import page_routes
from tessera.server.render import chat_chunks, chat_completion, text_chunks, text_completion
from tessera.server.routes_responses import ResponsesApi
from tessera.server.service import AnswerJob, Service, TokenPrompt
from tessera.server.speech import SPEECH, SpeechRequest, speak_text, voice_of
from tessera.server.spoken_chat import spoken_chunks, spoken_completion
from tessera.server.streams import EventStream, Result, first_of, in_time, to_json, while_connected
from tessera.server.transcriptions import TRANSCRIPTIONS, transcribe
from tessera.version import __version__

B = TypeVar("B", bound=Body)
_HEALTH_S = 60.0  # time limit of a step: if one takes longer, the engine is reported as unhealthy
_STATS_S = 2.0  # maximum wait for the engine's statistics


class Json(Response):
    """Represent a JSON body. Characters that are not valid Unicode are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


def parsed(body: bytes, kind: type[B]) -> B:
    """Parse a body as a request. Raise if it is not a JSON object, or has unknown, unsupported or wrong fields."""
    return checked(read_object(body), kind)


def checked(values: dict[str, Any], kind: type[B]) -> B:
    """Validate values as a request. Raise for unknown, unsupported and wrong fields."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        refused = kind.unsupported if issubclass(kind, OpenAIBody) else REFUSED
        raise of_validation(error, refused, kind.model_fields) from None


def with_body(
    kind: type[B],
) -> Callable[[Callable[[Any, B, Request], Awaitable[Response]]], Callable[[Any, Request], Awaitable[Response]]]:
    """Parse the body of a request for a method of `Endpoints`. Its bytes count until the method has returned."""

    def decorated(
        answer: Callable[[Any, B, Request], Awaitable[Response]],
    ) -> Callable[[Any, Request], Awaitable[Response]]:
        @functools.wraps(answer)
        async def endpoint(self: Endpoints, request: Request) -> Response:
            with self.admission.body() as body:
                return await answer(self, parsed(await body.read(request, self.settings), kind), request)

        return endpoint

    return decorated


class Endpoints:
    """Answer requests with a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.settings = service.settings
        self.admission = Admission(service.settings)

    async def read(self, request: Request) -> bytes:
        """Return the body of a request, within the limits."""
        with self.admission.body() as body:
            return await body.read(request, self.settings)

    # ------------------------------------------------------------------------------------------ answers

    @with_body(ChatRequest)
    async def chat(self, fields: ChatRequest, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        return self._sent(await self._chat(fields, request))

    async def run_chat(self, values: dict[str, Any], request: Request) -> Result:
        """Answer the body of a chat completion: as a whole, or as chunks if it has `stream: true`."""
        return await self._chat(checked(values, ChatRequest), request)

    async def _chat(self, fields: ChatRequest, request: Request) -> Result:
        spoken = "audio" in (fields.modalities or ())
        if spoken:  # raise for an unknown voice before the answer is generated
            voice_of(self.service).speaker.check_voice("" if fields.audio is None else fields.audio.voice)
        complete, chunks = (spoken_completion, spoken_chunks) if spoken else (chat_completion, chat_chunks)
        return await self._answer(request, fields, fields.n, self.service.chat_job, complete, chunks)

    @with_body(SpeechRequest)
    async def speech(self, fields: SpeechRequest, request: Request) -> Response:
        """Answer /v1/audio/speech."""
        return await speak_text(self.service, self.admission, fields, request)

    async def transcriptions(self, request: Request) -> Response:
        """Answer /v1/audio/transcriptions."""
        with self.admission.body() as body:
            content = await body.read(request, self.settings)
            return await transcribe(self.run_chat, self.service.tokens, content, request)

    @with_body(CompletionRequest)
    async def completions(self, fields: CompletionRequest, request: Request) -> Response:
        """Answer /v1/completions."""
        if fields.echo and fields.stream:
            raise ApiError(400, "echo cannot be streamed", param="echo", code="invalid_value")
        count = fields.n * len(_prompts(fields))
        # more answers than the server computes at a time could never be admitted
        if count > self.settings.max_requests:
            most = self.settings.max_requests
            message = f"the request asks for {count} answers; the limit is {most}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self._sent(await self._answer(request, fields, count, self._text_job, text_completion, text_chunks))

    def _sent(self, result: Result) -> Response:
        return Json(result) if isinstance(result, dict) else EventStream(result, self.settings.slow_client_s)

    async def _answer(
        self,
        request: Request,
        fields: Any,
        count: int,
        job_of: Callable[[Any], Awaitable[AnswerJob]],
        complete: Callable[[Service, AnswerJob, Any], Awaitable[dict[str, Any]]],
        chunks_of: Callable[[Service, AnswerJob, Any], AsyncGenerator[dict[str, Any], None]],
    ) -> Result:
        """Answer as a whole or as chunks. The client is watched from the beginning.

        The first chunk is awaited here, so that a request that the engine refuses gets an error status.
        """
        deadline = asyncio.get_running_loop().time() + self.settings.timeout_s

        async def whole() -> dict[str, Any]:
            async with asyncio.timeout_at(deadline):
                with self.admission.answers(count):
                    return await complete(self.service, await job_of(fields), fields)

        if not fields.stream:
            return await while_connected(request.receive, whole())
        chunks = in_time(self._stream(fields, count, job_of, chunks_of), deadline)
        return await first_of(request.receive, chunks)

    async def _stream(
        self,
        fields: Any,
        count: int,
        job_of: Callable[[Any], Awaitable[AnswerJob]],
        chunks_of: Callable[[Service, AnswerJob, Any], AsyncGenerator[dict[str, Any], None]],
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self.admission.answers(count):
            async with aclosing(chunks_of(self.service, await job_of(fields), fields)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _text_job(self, fields: CompletionRequest) -> AnswerJob:
        """Return the answers that a completion request asks for: `n` for each prompt."""
        adapter = self.service.adapter_of(fields.model)
        if fields.echo and fields.logprobs is not None:
            fields = fields.model_copy(update={"prompt_logprobs": max(fields.logprobs, fields.prompt_logprobs or 0)})
        most = 16 if fields.max_tokens is None else fields.max_tokens
        special = fields.add_special_tokens is not False
        prompts: list[TokenPrompt] = []
        requests = []
        for text in _prompts(fields):
            prompt = await self.service.text_prompt(text, special=special)
            more = self.service.engine_requests(fields, prompt, most, fields.logprobs, adapter)
            prompts += [prompt] * len(more)
            requests += more
        return AnswerJob(requests, prompts, fields.model or self.settings.name)

    # ------------------------------------------------------------------------------------------ tokens

    @with_body(TokenizeRequest)
    async def tokenize(self, fields: TokenizeRequest, request: Request) -> Response:
        """Answer /tokenize."""
        self.service.adapter_of(fields.model)
        if fields.messages is None:
            tokens = await self.service.tokens_of(fields.prompt or "", special=fields.add_special_tokens)
        else:
            continues = fields.continue_final_message
            prompt = await self.service.chat_prompt(
                fields.messages, fields.tools, answer=fields.add_generation_prompt, continues=continues
            )
            tokens = list(prompt.tokens)
        body = {
            "count": len(tokens),
            "max_model_len": self.settings.max_length,
            "tokens": tokens,
            "token_strs": [self.service.tokens.spell(token) for token in tokens] if fields.return_token_strs else None,
        }
        return Json(body)

    @with_body(DetokenizeRequest)
    async def detokenize(self, fields: DetokenizeRequest, request: Request) -> Response:
        """Answer /detokenize."""
        self.service.adapter_of(fields.model)
        return Json({"prompt": await self.service.text_of(fields.tokens)})

    # ------------------------------------------------------------------------------------------ models and adapters

    async def models(self, request: Request) -> Response:
        """Answer /v1/models: the base model, and loaded adapters."""
        head = {"object": "model", "created": self.service.started, "owned_by": "tessera"}
        head["max_model_len"] = self.settings.max_length
        base = self.settings.name
        listed = [{"id": base, **head, "root": base, "parent": None}]
        listed += [{"id": name, **head, "root": name, "parent": base} for name in self.service.adapters]
        return Json({"object": "list", "data": listed})

    @with_body(LoadAdapterRequest)
    async def load_adapter(self, fields: LoadAdapterRequest, request: Request) -> Response:
        """Answer /v1/load_lora_adapter."""
        folder = self._adapter_folder(fields.lora_path)
        name = fields.lora_name
        if name == self.settings.name or name in self.service.adapters:
            raise ApiError(400, f"the name {name!r} is in use", param="lora_name", code="name_in_use")
        await asyncio.wrap_future(self.service.engine.call(lambda engine: engine.load_adapter(name, folder)))
        self.service.adapters[name] = str(folder)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @with_body(UnloadAdapterRequest)
    async def unload_adapter(self, fields: UnloadAdapterRequest, request: Request) -> Response:
        """Answer /v1/unload_lora_adapter."""
        self._allowed_adapters()
        name = fields.lora_name
        if name not in self.service.adapters:
            raise ApiError(404, f"there is no adapter {name!r}", param="lora_name", code="adapter_not_found")
        await asyncio.wrap_future(self.service.engine.call(lambda engine: engine.unload_adapter(name)))
        self.service.adapters.pop(name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _allowed_adapters(self) -> Path:
        if self.settings.allow_adapters is None:
            raise ApiError(
                403,
                "clients may not change adapters: start the server with --allow-adapters FOLDER",
                code="adapters_not_allowed",
            )
        return self.settings.allow_adapters

    def _adapter_folder(self, path: str) -> Path:
        """Return the folder of an adapter, which must be below the allowed folder after links are resolved."""
        root = self._allowed_adapters().resolve()
        try:
            folder = (root / path).resolve()
            exists = folder.is_relative_to(root) and folder.exists()
        except (OSError, ValueError):
            raise ApiError(400, "not a usable path", param="lora_path", code="invalid_value") from None
        if not exists:
            raise ApiError(
                400,
                "there is no such adapter below the folder of --allow-adapters",
                param="lora_path",
                code="adapter_not_found",
            )
        return folder

    # ------------------------------------------------------------------------------------------ state

    async def health(self, request: Request) -> Response:
        """Answer /health: the engine must answer between two steps."""
        future = asyncio.wrap_future(self.service.engine.call(lambda engine: None))
        done, _ = await asyncio.wait({future}, timeout=_HEALTH_S)
        if not done:
            raise ApiError(503, "the engine does not answer", code="engine_stuck")
        future.result()
        return Json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """Answer /version."""
        return Json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Answer /metrics. If the engine does not answer within 2 s, its figures are left out."""
        future = asyncio.wrap_future(self.service.engine.call(lambda engine: engine.stats()))
        done, _ = await asyncio.wait({future}, timeout=_STATS_S)
        stats = future.result() if done else None
        text = self.service.metrics.text(stats)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def routes(endpoints: Endpoints) -> list[Route]:
    return [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/load_lora_adapter", endpoints.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload_adapter, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route(TRANSCRIPTIONS, endpoints.transcriptions, methods=["POST"]),
        Route(SPEECH, endpoints.speech, methods=["POST"]),
        *ResponsesApi(endpoints.run_chat, endpoints.read, endpoints.settings.slow_client_s).routes(),
    ]


def make_app(service: Service) -> Starlette:
    """Return the application: the API, and the chat page at /."""
    page = page_routes(service.settings)
    listed = [*routes(Endpoints(service)), *page]
    paths = frozenset(route.path for route in listed)
    open_paths = frozenset({"/health", *(route.path for route in page)})
    guard = Middleware(
        RequestGuard,
        settings=service.settings,
        metrics=service.metrics,
        paths=paths,
        open_paths=open_paths,
        form_paths=frozenset({TRANSCRIPTIONS}),
    )

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"there is nothing at {request.url.path[:200]}" if error.status_code == 404 else error.detail
        if error.status_code == 405:
            message = f"{request.method} is not allowed here"
        return error_response(ApiError(error.status_code, message, code=f"http_{error.status_code}"))

    return Starlette(routes=listed, middleware=[guard], exception_handlers={HTTPException: refused})


def _prompts(fields: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a completion: a text, tokens, or a list of either."""
    prompt = fields.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
