"""A conversation with a loaded model. Each answer is generated from all previous messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tessera.core.batch import Batch
from tessera.engine.offline import ConversationEngine


class Answers(Protocol):
    """Protocol of models that a conversation can use: `generate` answers a prompt."""

    def generate(
        self,
        batch: Batch,
        max_new_tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        on_text: Callable[[str], None] | None = ...,
        turns: ConversationEngine | None = ...,
    ) -> str | list[str]: ...


@dataclass
class Chat:
    """Hold a conversation with a model.

    `processor`: turns messages into a batch; `tessera.load` returns one. `sampling`: temperature, top_k, top_p, seed.
    The keys and values of all turns stay in a cache of this conversation; `clear` frees it. Call it also after a change
    of the model's weights.
    """

    model: Answers
    processor: Callable[[Sequence[Any]], Batch]
    system: str | None = None
    max_new_tokens: int = 512
    sampling: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)  # all messages except the system message
    engine: ConversationEngine = field(default_factory=ConversationEngine, init=False, repr=False, compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as a list of messages, with the system message."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def ask(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Ask the next question and return the answer. `on_text` is called with each new part of the answer.

        Images are paths, PIL images or bytes; videos are paths, bytes or arrays of frames; audios are paths, which may
        name a part as in talk.flac#t=12.5,17.25, bytes, or {"array": samples, "sampling_rate": 16000}. If generation
        fails or is interrupted, the conversation is unchanged.
        """
        question = question_of(text, images, videos, audios)
        batch = self.processor([*self.messages, question])
        answer = self.model.generate(batch, self.max_new_tokens, on_text=on_text, turns=self.engine, **self.sampling)
        assert isinstance(answer, str), "one conversation has one answer"
        self.turns += [question, {"role": "assistant", "content": answer}]
        return answer

    def undo(self) -> bool:
        """Remove the last question and its answer. Return False if the conversation is empty."""
        had = bool(self.turns)
        del self.turns[-2:]
        return had

    def clear(self) -> None:
        """Remove all questions and answers, and free the cache. The system message is kept."""
        self.turns.clear()
        self.engine.close()

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the conversation for a JSON file, with media as paths. Other media objects are dropped."""
        return [{**message, "content": _plain(message["content"])} for message in self.messages]


def question_of(
    text: str, images: Sequence[Any] = (), videos: Sequence[Any] = (), audios: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the message of a question."""
    media = [{"type": "image", "image": image} for image in images]
    media += [{"type": "video", "video": video} for video in videos]
    media += [{"type": "audio", "audio": audio} for audio in audios]
    words = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": [*media, *words] if media else text}


def _plain(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts = ({key: str(value) for key, value in part.items()} for part in content if _is_plain(part))
    return list(parts)


def _is_plain(part: dict[str, Any]) -> bool:
    return all(isinstance(value, (str, Path)) for value in part.values())
