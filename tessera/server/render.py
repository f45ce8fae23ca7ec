"""Write answers as JSON in OpenAI's form, complete or as chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tessera.engine.request import Delta, Finish, TokenLogprob
from tessera.server.answer_parts import AnswerParts
from tessera.server.fields import ChatRequest, CompletionRequest, SamplingFields
from tessera.server.pieces import Fields, joined
from tessera.server.service import AnswerJob, Service
from tessera.server.tokens import Tokens


@dataclass
class ChoiceState:
    """Hold one answer while it is generated."""

    splitter: AnswerParts
    parts: list[Fields] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finish: Finish | None = None
    has_calls: bool = False

    def add(self, delta: Delta) -> list[Fields]:
        """Add a delta, and return the new parts of the message."""
        parts = self.splitter.add(delta.text) if delta.text else []
        if delta.finish is not None:
            self.finish = delta.finish
            parts = [*parts, *self.splitter.close()]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.has_calls = self.has_calls or any("tool_calls" in part for part in parts)
        return parts

    def keep(self, delta: Delta) -> None:
        """Add a delta and store its parts, for an answer that is returned only when it is complete."""
        self.parts += self.add(delta)
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs

    def finish_reason(self) -> str | None:
        if self.finish is None:
            return None
        return "tool_calls" if self.has_calls and self.finish.reason == "stop" else self.finish.reason

    def stop_reason(self, fields: SamplingFields) -> str | int | None:
        """Return the stop string or token of the request that ended the answer; None if the model ended it."""
        stop = None if self.finish is None else self.finish.stop
        return stop if isinstance(stop, str) or stop in fields.stop_token_ids else None

    def end_of_chunk(self, delta: Delta, fields: SamplingFields) -> Fields:
        """Return the last fields of a choice in a stream: why the answer ends, and its tokens if requested."""
        end: Fields = {"finish_reason": self.finish_reason()}
        if delta.finish is not None:
            end["stop_reason"] = self.stop_reason(fields)
        if fields.return_token_ids:
            end["token_ids"] = list(delta.tokens)
        return end


async def complete(service: Service, job: AnswerJob) -> list[ChoiceState]:
    """Run all answers to their ends."""
    answers = [ChoiceState(job.splitter()) for _ in job.requests]
    async with aclosing(service.run(job)) as deltas:
        async for index, delta in deltas:
            answers[index].keep(delta)
    return answers


def usage(job: AnswerJob, answers: Sequence[ChoiceState]) -> dict[str, Any]:
    """Count the tokens of a request. A prompt with several answers is counted once."""
    prompts = {id(prompt): len(prompt.tokens) for prompt in job.prompts}
    cached: dict[int, int] = {}
    for prompt, answer in zip(job.prompts, answers, strict=True):
        if answer.finish is not None:
            cached.setdefault(id(prompt), answer.finish.cached_tokens)
    prompt_count = sum(prompts.values())
    new = sum(0 if answer.finish is None else answer.finish.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": new,
        "total_tokens": prompt_count + new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


# ---------------------------------------------------------------------------------------------- chat


def _chat_head(job: AnswerJob, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{job.id}", "object": kind, "created": job.created, "model": job.model}


async def chat_completion(service: Service, job: AnswerJob, fields: ChatRequest) -> dict[str, Any]:
    """Return the body of a complete chat answer."""
    answers = await complete(service, job)
    choices = []
    for index, answer in enumerate(answers):
        parts = joined(answer.parts)
        message = {
            "role": "assistant",
            "content": parts.pop("content", None if parts else ""),
            "refusal": None,
            **parts,
        }
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(service.tokens, answer.logprobs) if fields.logprobs else None,
            "finish_reason": answer.finish_reason(),
            "stop_reason": answer.stop_reason(fields),
        }
        if fields.return_token_ids:
            choice["token_ids"] = answer.tokens
        choices.append(choice)
    body = {**_chat_head(job, "chat.completion"), "choices": choices, "usage": usage(job, answers)}
    if fields.return_token_ids:
        body["prompt_token_ids"] = list(job.prompts[0].tokens)
    if fields.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(service.tokens, answers[0].prompt_logprobs)
    return body


async def chat_chunks(service: Service, job: AnswerJob, fields: ChatRequest) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a streamed chat answer."""
    head = _chat_head(job, "chat.completion.chunk")
    if fields.stream_options is not None and fields.stream_options.include_usage:
        head["usage"] = None
    answers = [ChoiceState(job.splitter()) for _ in job.requests]
    begun = False
    async with aclosing(service.run(job)) as deltas:
        async for index, delta in deltas:
            if not begun:  # until the first chunk is sent, a request that the engine refuses can get an error status
                begun = True
                for chunk in _chat_beginnings(head, job, fields):
                    yield chunk
            answer = answers[index]
            parts = answer.add(delta)
            if not (parts or delta.finish or delta.logprobs or (fields.return_token_ids and delta.tokens)):
                continue  # the text so far is a part of a character, or may begin a stop string
            logprobs = _chat_logprobs(service.tokens, delta.logprobs) if fields.logprobs else None
            choice = {"index": index, "delta": _one_delta(parts), "logprobs": logprobs}
            yield {**head, "choices": [choice | answer.end_of_chunk(delta, fields)]}
    if "usage" in head:
        yield {**head, "choices": [], "usage": usage(job, answers)}


def _chat_beginnings(head: dict[str, Any], job: AnswerJob, fields: ChatRequest) -> Iterator[dict[str, Any]]:
    for index, prompt in enumerate(job.prompts):
        delta = {"role": "assistant", "content": ""}
        first = {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if fields.return_token_ids:
            first["prompt_token_ids"] = list(prompt.tokens)
        yield first


def _one_delta(parts: Sequence[Fields]) -> Fields:
    """Return parts of a message as one delta."""
    delta: Fields = {}
    for part in parts:
        for key, value in part.items():
            delta[key] = delta[key] + value if key in delta else value
    return delta


def _chat_logprobs(tokens: Tokens, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry_of(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokens.spell(token), "logprob": _finite(logprob), "bytes": tokens.bytes_of(token)}

    content = [
        {**entry_of(entry.token, entry.logprob), "top_logprobs": [entry_of(*top) for top in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _prompt_logprobs(tokens: Tokens, logprobs: Sequence[TokenLogprob | None] | None) -> list[Any]:
    """Return {token id: log-probability and rank} of each token of the prompt; None for the first token."""
    result: list[Any] = []
    for entry in logprobs or ():
        if entry is None:
            result.append(None)
            continue
        ranked = [(entry.token, entry.logprob, entry.rank)]
        ranked += [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1) if token != entry.token]
        result.append(
            {
                str(token): {"logprob": _finite(p), "rank": rank, "decoded_token": tokens.spell(token)}
                for token, p, rank in ranked
            }
        )
    return result


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent: minus infinity becomes -9999."""
    return max(logprob, -9999.0)


# ---------------------------------------------------------------------------------------------- text completions


def _text_head(job: AnswerJob) -> dict[str, Any]:
    return {"id": f"cmpl-{job.id}", "object": "text_completion", "created": job.created, "model": job.model}


async def text_completion(service: Service, job: AnswerJob, fields: CompletionRequest) -> dict[str, Any]:
    """Return the body of complete answers to texts."""
    answers = await complete(service, job)
    choices = []
    for index, answer in enumerate(answers):
        prompt = job.prompts[index]
        entries, text = list[TokenLogprob | None](answer.logprobs), answer.text
        if fields.echo:
            entries = [*(answer.prompt_logprobs or ()), *entries]
            text = service.tokens.decode(prompt.tokens, skip_special=False) + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason(),
            "stop_reason": answer.stop_reason(fields),
        }
        if fields.logprobs is not None:
            first = prompt.tokens[0] if fields.echo else None
            choice["logprobs"] = _text_logprobs(service.tokens, entries, first)
        if fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(service.tokens, answer.prompt_logprobs)
        if fields.return_token_ids:
            choice |= {"token_ids": answer.tokens, "prompt_token_ids": list(prompt.tokens)}
        choices.append(choice)
    return {**_text_head(job), "choices": choices, "usage": usage(job, answers)}


async def text_chunks(
    service: Service, job: AnswerJob, fields: CompletionRequest
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of streamed answers to texts."""
    head = _text_head(job)
    if fields.stream_options is not None and fields.stream_options.include_usage:
        head["usage"] = None
    answers = [ChoiceState(job.splitter()) for _ in job.requests]
    lengths = [0 for _ in job.requests]  # number of characters of each answer before the current chunk
    async with aclosing(service.run(job)) as deltas:
        async for index, delta in deltas:
            answer = answers[index]
            answer.add(delta)
            if not (delta.text or delta.finish or delta.logprobs or (fields.return_token_ids and delta.tokens)):
                continue
            logprobs = None
            if fields.logprobs is not None:
                logprobs = _text_logprobs(service.tokens, delta.logprobs, None, lengths[index])
                lengths[index] += sum(map(len, logprobs["tokens"]))
            choice = {"index": index, "text": delta.text, "logprobs": logprobs}
            yield {**head, "choices": [choice | answer.end_of_chunk(delta, fields)]}
    if "usage" in head:
        yield {**head, "choices": [], "usage": usage(job, answers)}


def _text_logprobs(
    tokens: Tokens, entries: Sequence[TokenLogprob | None], first: int | None, at: int = 0
) -> dict[str, Any]:
    """Return the logprobs of a text that begins at offset `at`.

    `first`: the first token of the prompt, whose entry is None because nothing predicts it.
    """
    texts: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token = first if entry is None else entry.token
        assert token is not None, "only the first token of a prompt has no logprob"
        texts.append(tokens.spell(token))
        offsets.append(at)
        at += len(texts[-1])
        values.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else {tokens.spell(t): _finite(p) for t, p in entry.top})
    return {"text_offset": offsets, "tokens": texts, "token_logprobs": values, "top_logprobs": tops}
