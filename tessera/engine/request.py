"""Define what a caller asks of the engine, and what the engine returns.

A request has one prompt and its own sampling. Its tokens depend on its prompt and its seed alone, never on the requests
that run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from tessera.core.batch import Batch
from tessera.errors import TesseraError


@dataclass(frozen=True)
class Sampling:
    """Describe how tokens are sampled. `temperature` 0: greedy decoding, which ignores top_k, top_p and min_p.

    Order of operations: penalties and bias, constraint, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit; 0: only the likeliest token, and tokens with the same probability
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest; 0: no limit
    seed: int = 0
    repetition_penalty: float = 1.0  # penalty for tokens of prompt and answer, as in transformers; 1: none
    presence_penalty: float = 0.0  # penalty for tokens of the answer, as in OpenAI's API
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: frozenset[int] | None = None  # the only tokens that may be sampled; None: all

    def __post_init__(self) -> None:
        finite = float("inf")
        for name, in_range, allowed in (
            ("temperature", 0 <= self.temperature < finite, "0 and above"),
            ("top_k", self.top_k >= 0, "0 (no limit) and above"),
            ("top_p", 0 <= self.top_p <= 1, "0 to 1 (no limit)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (no limit) to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < finite, "above 0; 1 is none"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("logit_bias", all(-100 <= bias <= 100 for bias in self.logit_bias.values()), "-100 to 100 for each token"),
            ("allowed_tokens", self.allowed_tokens is None or len(self.allowed_tokens) > 0, "one token or more"),
        ):
            if not in_range:
                raise TesseraError(
                    f"{name}={getattr(self, name)} is out of range",
                    where="sampling",
                    allowed=[allowed],
                    code="generation.sampling-out-of-range",
                )

    def nth(self, index: int) -> Sampling:
        """Return the sampling of the answer with this index, of several answers to one prompt (`n`)."""
        return self if index == 0 else replace(self, seed=self.seed + 0x9E3779B97F4A7C15 * index & (1 << 63) - 1)


GREEDY = Sampling()


@dataclass(frozen=True)
class Constraint:
    """Restrict an answer to a formal language. An answer that reaches its maximum length may be incomplete."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str = ""  # JSON schema, regular expression, JSON list of choices, or Lark grammar


@dataclass(frozen=True)
class Request:
    """Hold one prompt and how it is answered."""

    prompt: Batch  # one prompt, on the host, as `Processor.prompt` returns it
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    # before this number of tokens, stop tokens are not sampled and stop strings do not end the answer
    min_new_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()  # all stop tokens: the engine adds none
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # whether a stop string is a part of the answer
    stream: bool = True  # whether text is needed token by token; False: it may all come with the last delta
    # None: return no log-probabilities; 0: those of the sampled tokens; n: also those of the n likeliest tokens
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    constraint: Constraint | None = None
    adapter: str | None = None  # name of a loaded adapter; None: the base model
    skip_special: bool = True  # whether the text leaves out special tokens
    priority: int = 0  # requests with a lower number are served first


@dataclass(frozen=True)
class TokenLogprob:
    """Hold a token, its log-probability and rank, and the likeliest tokens at its position with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 + number of tokens with a larger logit


@dataclass(frozen=True)
class Finish:
    """State why an answer ended, and count its tokens."""

    reason: Literal["stop", "length", "aborted", "error"]
    stop: str | int | None = None  # the stop string or stop token that ended the answer
    error: TesseraError | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt whose keys and values were reused
    new_tokens: int = 0  # including a stop token
    logprob: TokenLogprob | None = None  # log-probability of the stop token, if log-probabilities were requested


class Delta(NamedTuple):
    """Hold the next part of an answer.

    Text may lag behind tokens: incomplete characters and possible stop strings are held back.
    """

    request: int
    tokens: tuple[int, ...] = ()  # new tokens, without a stop token
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token in `tokens`; () if not requested
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per token of the prompt, None for the first
    finish: Finish | None = None  # set in the last delta


def check_new_tokens(count: int) -> None:
    """Raise if a request asks for a negative number of new tokens."""
    if count < 0:
        raise TesseraError(
            f"max_new_tokens must be 0 or more, got {count}",
            allowed=["0 and above"],
            code="generation.max-tokens-too-small",
        )


@dataclass(frozen=True)
class Answer:
    """Hold a complete answer."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    finish: Finish

    @staticmethod
    def of(deltas: Sequence[Delta]) -> Answer:
        """Return the answer that these deltas of one request make up."""
        finish = deltas[-1].finish
        assert finish is not None, "the last delta has the finish"
        return Answer(
            tuple(token for delta in deltas for token in delta.tokens),
            "".join(delta.text for delta in deltas),
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
            next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
            finish,
        )
