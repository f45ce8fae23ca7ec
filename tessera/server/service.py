"""Turn validated requests into requests of the engine, and run them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tessera.core.batch import Batch
from tessera.data.media.urls import UrlPolicy
from tessera.engine.request import Constraint, Delta, Request, Sampling
from tessera.inference.prepare import LONG_TEXT, PromptPool
from tessera.server.answer_parts import AnswerParts
from tessera.server.answers import AnswerGroup, EngineAccess, Mailbox, Submitters
from tessera.server.content import chat_messages, text_length
from tessera.server.errors import ApiError
from tessera.server.fields import ChatRequest, SamplingFields, Tool
from tessera.server.messages import ChatMessage
from tessera.server.metrics import Metrics
from tessera.server.prompts import NO_FILES, download_media, has_urls
from tessera.server.reasoning import reasoning_for
from tessera.server.settings import Settings
from tessera.server.tokens import Tokens, prompt_tokens
from tessera.server.tools import constraint_for, parser_for
from tessera.server.voice import Voice

_SUBMITTERS = (("submit", 4), ("compile-quickly", 2), ("compile", 2))  # name and number of threads


@dataclass(frozen=True)
class TokenPrompt:
    """Hold one prompt and its tokens."""

    batch: Batch
    tokens: Sequence[int]


@dataclass(frozen=True)
class AnswerJob:
    """Hold the answers to one API request: for each answer its prompt, and its request to the engine."""

    requests: Sequence[Request]
    prompts: Sequence[TokenPrompt]  # the prompt of each answer
    model: str
    splitter: Callable[[], AnswerParts] = field(default=lambda: AnswerParts(None, None))
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)
    id: str = field(default_factory=lambda: secrets.token_hex(12))


@dataclass
class Service:
    """Hold what the endpoints share. `family`: the model's family, which determines forms of tool calls."""

    settings: Settings
    engine: EngineAccess
    prompts: PromptPool
    tokens: Tokens
    metrics: Metrics
    adapters: dict[str, str] = field(default_factory=dict)  # served names of adapters, with their folders
    family: str = ""
    voice: Voice | None = None  # speaks answers; None: the served model has no speech
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def mailbox(self) -> Mailbox:
        return Mailbox(asyncio.get_running_loop())

    @cached_property
    def submitters(self) -> Submitters:
        return Submitters(*(ThreadPoolExecutor(count, name) for name, count in _SUBMITTERS))

    @cached_property
    def _helpers(self) -> ThreadPoolExecutor:
        """Return the threads that tokenize plain texts and decode tokens."""
        return ThreadPoolExecutor(4, "helper")

    @cached_property
    def _long_texts(self) -> ThreadPoolExecutor:
        """Return the thread that tokenizes long texts, so that short texts do not wait for them."""
        return ThreadPoolExecutor(1, "long-texts")

    @cached_property
    def _downloaders(self) -> ThreadPoolExecutor:
        """Return threads that download media. Slow downloads must not delay texts."""
        return ThreadPoolExecutor(32, "download")

    # ------------------------------------------------------------------------------------------ prompts

    async def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        answer: bool,
        continues: bool,
        frames: int | None = None,
    ) -> TokenPrompt:
        """Return the prompt of a conversation. `answer`: whether it ends with the header of the answer.

        `frames`: number of frames to sample from each video; None: as the processor does.
        """
        if continues and answer:
            raise ApiError(
                400,
                "add_generation_prompt and continue_final_message exclude each other: set add_generation_prompt: false",
                param="add_generation_prompt",
                code="invalid_value",
            )
        listed = chat_messages(messages, tools, self.settings, continues=continues or not answer)
        self._check_characters(text_length(listed), "messages")
        if has_urls(listed):
            listed = await download_media(listed, UrlPolicy(), self._downloaders)
        ending = "continue" if continues else "answer" if answer else "none"
        root = self.settings.allow_files or NO_FILES
        batch = await asyncio.wrap_future(self.prompts.submit(listed, root, ending=ending, frames=frames))
        tokens = prompt_tokens(batch)
        if len(tokens) >= self.settings.max_length:
            raise self._too_long(len(tokens), "messages")
        return TokenPrompt(batch, tokens)

    async def text_prompt(self, prompt: str | Sequence[int], *, special: bool = True) -> TokenPrompt:
        """Return the prompt of a plain text, or of tokens."""
        if isinstance(prompt, str):
            tokens = await self.tokens_of(prompt, special=special)
        else:
            tokens = list(prompt)
            self.check_tokens(tokens, "prompt")
        if not tokens:
            raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
        if len(tokens) >= self.settings.max_length:
            raise self._too_long(len(tokens), "prompt")
        return TokenPrompt(self.tokens.batch(tokens), tokens)

    async def tokens_of(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a plain text, which may have none."""
        self._check_characters(len(text), "prompt")
        threads = self._helpers if len(text) <= LONG_TEXT else self._long_texts
        encode = partial(self.tokens.encode, text, special=special)
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, of at most as many as the context has."""
        self.check_tokens(tokens, "tokens")
        if len(tokens) > self.settings.max_length:
            raise self._too_long(len(tokens), "tokens")
        decode = partial(self.tokens.decode, tokens, skip_special=False)
        return await asyncio.get_running_loop().run_in_executor(self._helpers, decode)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise if a number is not a token id of the vocabulary."""
        if tokens and max(tokens) >= self.tokens.size:
            raise ApiError(
                400,
                f"{max(tokens)} is not a token: the vocabulary has {self.tokens.size}",
                param=param,
                code="invalid_value",
            )

    def _check_characters(self, count: int, param: str) -> None:
        """Refuse, before tokenizing, texts that would be too long even if every token were the longest one."""
        most = self.settings.max_length * self.tokens.longest
        if count > most:
            raise ApiError(
                400,
                f"the texts have {count} characters; at most {most} fit into the {self.settings.max_length} tokens of "
                "this model's context",
                param=param,
                code="context_length_exceeded",
            )

    def _too_long(self, count: int, param: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {count} tokens; the context of this model has {self.settings.max_length} tokens, for "
            "prompt and answer",
            param=param,
            code="context_length_exceeded",
        )

    # ------------------------------------------------------------------------------------------ requests

    async def chat_job(self, request: ChatRequest) -> AnswerJob:
        """Return the answers that a chat request asks for."""
        adapter = self.adapter_of(request.model)
        tools = () if request.tool_choice == "none" else request.tools
        forced = self._forced_calls(request)
        video = request.media_io_kwargs and request.media_io_kwargs.video
        prompt = await self.chat_prompt(
            request.messages,
            tools,
            answer=request.add_generation_prompt,
            continues=request.continue_final_message,
            frames=video.num_frames if video else None,
        )
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = request.top_logprobs if request.logprobs else None
        requests = self.engine_requests(request, prompt, most, logprobs, adapter)
        if forced is not None:
            requests = [replace(single, constraint=forced) for single in requests]
        names = [tool.function.name for tool in tools]
        # Some chat templates end the prompt with the opening tag of the reasoning.
        end = self.tokens.decode(prompt.tokens[-8:], skip_special=False)

        def splitter() -> AnswerParts:
            parser = parser_for(self.family, names) if names else None
            return AnswerParts(reasoning_for(self.family, end), parser, one_call=not request.parallel_tool_calls)

        return AnswerJob(requests, [prompt] * len(requests), request.model or self.settings.name, splitter)

    def _forced_calls(self, request: ChatRequest) -> Constraint | None:
        """Return the constraint of `tool_choice`. Raise if the request has another constraint as well."""
        choice = request.tool_choice
        named = choice if choice is None or isinstance(choice, str) else choice.model_dump()
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        constraint = constraint_for(tools, named, parallel=request.parallel_tool_calls)
        if constraint is not None and _constraint(request) is not None:
            raise ApiError(
                400,
                "tool_choice cannot be combined with another constraint of the answer",
                param="tool_choice",
                code="invalid_value",
            )
        return constraint

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a model name means; None: the base model. Raise for unknown names."""
        if model is None or model == self.settings.name:
            return None
        if model in self.adapters:
            return model
        names = ", ".join([self.settings.name, *self.adapters][:20])
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; this server has: {names}",
            param="model",
            code="model_not_found",
        )

    def engine_requests(
        self, request: SamplingFields, prompt: TokenPrompt, most: int | None, logprobs: int | None, adapter: str | None
    ) -> list[Request]:
        """Return `n` engine requests for one prompt, with different seeds."""
        if request.n > self.settings.max_answers:
            raise ApiError(
                400, f"n is {request.n}; the limit is {self.settings.max_answers}", param="n", code="invalid_value"
            )
        room = self.settings.max_length - len(prompt.tokens)
        if most is not None and most > room:
            raise ApiError(
                400,
                f"{len(prompt.tokens)} tokens of the prompt and {most} new tokens do not fit into the context of "
                f"{self.settings.max_length} tokens; at most {room} new tokens fit",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if request.min_tokens > (room if most is None else most):
            raise ApiError(
                400,
                "min_tokens is larger than max_tokens, or than the rest of the context",
                param="min_tokens",
                code="invalid_value",
            )
        if request.priority and not self.settings.allow_priority:
            message = "this server treats all requests alike, unless it is started with --allow-priority"
            raise ApiError(400, message, param="priority", code="priority_not_allowed")
        for name, tokens in (
            ("stop_token_ids", request.stop_token_ids),
            ("allowed_token_ids", request.allowed_token_ids or []),
            ("logit_bias", [int(key) for key in request.logit_bias]),
        ):
            if tokens:
                self.check_tokens(tokens, name)
        stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self.tokens.stops)
        single = Request(
            prompt=prompt.batch,
            sampling=_sampling(request),
            max_new_tokens=room if most is None else most,
            min_new_tokens=request.min_tokens,
            stop_tokens=stops,
            stop=tuple(request.stop),
            include_stop=request.include_stop_str_in_output,
            stream=request.stream,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
            constraint=_constraint(request),
            adapter=adapter,
            skip_special=request.skip_special_tokens,
            priority=request.priority,
        )
        return [replace(single, sampling=single.sampling.nth(index)) for index in range(request.n)]

    async def run(self, job: AnswerJob) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (index of the answer, delta) until all answers are complete. Raise for an answer that failed.

        Close the iterator to abort the answers: `contextlib.aclosing`.
        """
        timer = self.metrics.timer(job.started, [len(prompt.tokens) for prompt in job.prompts])
        async with AnswerGroup(self.engine, self.mailbox, self.submitters) as answers:
            await answers.submit(job.requests)
            async for index, delta in answers.deltas():
                timer.add(index, delta)
                finish = delta.finish
                if finish is not None and finish.reason == "error":
                    assert finish.error is not None, "an answer that fails has an error"
                    raise finish.error
                if finish is not None and finish.reason == "aborted":
                    raise ApiError(503, "the server aborted the answer", code="aborted")
                yield index, delta

    def close(self) -> None:
        """Close the engine and all threads. Running answers are aborted."""
        self.engine.close(0)
        if self.voice is not None:
            self.voice.close()
        self.prompts.close()
        for threads in (self._helpers, self._long_texts, self._downloaders):
            threads.shutdown(wait=False, cancel_futures=True)
        self.submitters.close()


def _sampling(request: SamplingFields) -> Sampling:
    seed = secrets.randbits(62) if request.seed is None else request.seed & ((1 << 63) - 1)
    allowed = request.allowed_token_ids
    return Sampling(
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        seed=seed,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias={int(key): bias for key, bias in request.logit_bias.items()},
        allowed_tokens=None if allowed is None else frozenset(allowed),
    )


def _constraint(request: SamplingFields) -> Constraint | None:
    shape, outputs = request.response_format, request.structured_outputs
    if shape is not None:
        if shape.type == "json_object":
            return Constraint("json_object")
        if shape.json_schema is not None and shape.type == "json_schema":
            return Constraint("json_schema", _text(shape.json_schema.schema_))
        return None
    if outputs is None:
        return None
    if outputs.json_ is not None:
        return Constraint("json_schema", _text(outputs.json_))
    if outputs.regex is not None:
        return Constraint("regex", outputs.regex)
    if outputs.choice is not None:
        return Constraint("choice", _text(outputs.choice))
    return Constraint("json_object") if outputs.grammar is None else Constraint("grammar", outputs.grammar)


def _text(value: Mapping[str, Any] | Sequence[str] | str | bool | None) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
