"""Conversations written by a model folder's chat template, with mark characters around the trained parts.

If only the assistant is trained, generation blocks in the template define the trained parts. Without blocks, or with
other trained roles, the text of each trained turn is marked before rendering; without marks the rendered text must stay
the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

from tessera.core.sample import PLAIN, Message, Part
from tessera.errors import TesseraError
from tessera.models.transformers.library import chat_template
from tessera.models.transformers.marks import Span, generation_marks, has_marks, marked, with_marks, without_marks
from tessera.models.transformers.rendering import TemplateLimit, render

Chat = list[dict[str, Any]]
# How a template gets the content of a message. "parts": a list of parts. "strings": a string if it is only text, else a
# list. "words": always a string, with placeholders for images.
Form = Literal["parts", "strings", "words"]
_FORMS: tuple[Form, ...] = ("parts", "strings", "words")
_AS_PYTHON = ("{'type'", '{"type"')  # what a template writes if it expects strings and gets a list of parts
MEND = "put {% generation %} and {% endgeneration %} around the assistant's text in the folder's chat template"


@dataclass(frozen=True, eq=False)
class Turns:
    """Write conversations with the folder's chat template.

    `processor`: transformers' processor, or the tokenizer for text-only classes.
    """

    processor: Any
    tokenizer: Any
    system: str | None = None  # system message of conversations without one
    sees: bool = False

    @cached_property
    def jinja(self) -> str:
        template = chat_template(self.processor, self.tokenizer)
        if template is None:
            raise TesseraError(
                "the folder has no chat template",
                where="chat_template.jinja",
                fix="copy chat_template.jinja from the instruction-tuned version of the model to the folder, or write "
                "your own template",
                code="tokenizer.no-chat-template",
            )
        return template

    @cached_property
    def _with_generation_marks(self) -> str | None:
        return generation_marks(self.jinja)

    @cached_property
    def control_words(self) -> tuple[str, ...]:
        """Return the special tokens, which only a template may write."""
        named = [getattr(self.processor, name, None) for name in ("image_token", "video_token", "audio_token")]
        words = {*self.tokenizer.all_special_tokens, *(word for word in named if isinstance(word, str))}
        words |= {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(word for word in words if word.strip()))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile(
            "|".join(re.escape(word) for word in sorted(self.control_words, key=len, reverse=True)) or "(?!)"
        )

    # ------------------------------------------------------------------------------------------ writing

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return a conversation with the generation prompt at its end."""
        self._check_words(messages)
        messages = self._with_system(messages)
        return self._render(self._chat(messages, self._form(messages, answer=True)), answer=True)

    def write(self, messages: Sequence[Message], train_on: Collection[str], *, last_only: bool = False) -> str:
        """Return a rendered conversation with mark characters (see `marks`) around its trained parts."""
        self._check_words(messages)
        if any(message.role == PLAIN for message in messages):
            return self._plain(messages)
        messages = self._with_system(messages)
        form = self._form(messages)
        plain = self._render(self._chat(messages, form))
        turns = [number for number, message in enumerate(messages) if message.role in train_on]
        if not turns:
            return plain
        spans = self._spans(messages, form, plain, turns, only_assistant=set(train_on) == {"assistant"})
        text = self._with_end(plain, spans) if messages[-1].role in train_on else plain
        if len(text) > len(plain):
            spans[-1] = (spans[-1][0], len(text))
        return with_marks(text, spans[-1:] if last_only else spans)

    def _plain(self, messages: Sequence[Message]) -> str:
        """Return text without a conversation format: all of it is trained, and an end-of-text token follows."""
        said = "".join(part.value for message in messages for part in message.parts if part.kind == "text")
        if any(part.kind != "text" for message in messages for part in message.parts):
            raise TesseraError(
                "plain text samples cannot contain images",
                fix="write the sample as a conversation",
                code="data.image-in-plain-text",
            )
        return with_marks(said + (self.tokenizer.eos_token or ""), [(0, len(said + (self.tokenizer.eos_token or "")))])

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.system is None or (messages and messages[0].role == "system"):
            return messages
        return [Message("system", (Part("text", self.system),)), *messages]

    def _check_words(self, messages: Sequence[Message]) -> None:
        """Raise an error for messages that contain special tokens, which the model would read as part of the
        template."""
        for number, message in enumerate(messages):
            for part in message.parts:
                if part.kind != "text":
                    continue
                word = self._control.search(part.value)
                if word is not None:
                    raise TesseraError(
                        f"message {number + 1} ({message.role}) contains {word[0]}, a special token of this tokenizer",
                        fix="change the text: the model would read it as part of the chat template",
                        code="data.control-word",
                    )
                if has_marks(part.value):
                    raise TesseraError(
                        f"message {number + 1} contains the reserved characters U+F5E00 or U+F5E01",
                        fix="remove these characters",
                        code="data.reserved-characters",
                    )

    # ------------------------------------------------------------------------------------------ the template

    def _chat(self, messages: Sequence[Message], form: Form, mark: Collection[int] = ()) -> Chat:
        return [
            {"role": message.role, "content": self._content(message, form, number in mark)}
            for number, message in enumerate(messages)
        ]

    def _content(self, message: Message, form: Form, mark: bool) -> Any:
        texts = [marked(part.value) if mark and part.kind == "text" else part.value for part in message.parts]
        kinds = [part.kind for part in message.parts]
        if form == "words" or (form == "strings" and all(kind == "text" for kind in kinds)):
            image = getattr(self.processor, "image_token", None) or ""
            return "".join(text if kind == "text" else image for kind, text in zip(kinds, texts, strict=True))
        return [
            {"type": "text", "text": text} if kind == "text" else {"type": "image"}
            for kind, text in zip(kinds, texts, strict=True)
        ]

    def _render(self, chat: Chat, *, jinja: str | None = None, answer: bool = False) -> str:
        where = f"chat_template of {self.tokenizer.name_or_path}"
        return render(jinja or self.jinja, chat, self.tokenizer.special_tokens_map, answer=answer, where=where)

    def _form(self, messages: Sequence[Message], answer: bool = False) -> Form:
        """Return the first `Form` of message contents for which the template writes all texts and images."""
        refusals: list[tuple[int, TesseraError]] = []  # (priority, error); the error of the highest priority is raised
        for form in _FORMS if self.sees else ("strings", "parts"):
            try:
                text = self._render(self._chat(messages, form), answer=answer)
            except TemplateLimit:
                raise
            except TesseraError as error:
                refusals.append((1, error))
                continue
            missing = self._missing(messages, text)
            if missing is None:
                return form
            refusals.append((0 if _as_python(messages, text) else 2, missing))
        raise max(refusals, key=itemgetter(0))[1]

    def _missing(self, messages: Sequence[Message], text: str) -> TesseraError | None:
        if _as_python(messages, text):
            return TesseraError(
                "the folder's chat template prints messages as Python lists, such as [{'type': 'text', ...}]",
                fix="use a chat template that prints the text of messages",
                code="tokenizer.template-writes-lists",
            )
        at = 0
        for number, message in enumerate(messages):
            for part in message.parts:
                words = part.value.strip() if part.kind == "text" else ""
                start = text.find(words, at)
                if start < 0:
                    return TesseraError(
                        f"the folder's chat template leaves out or changes message {number + 1} ({message.role})",
                        fix=MEND,
                        code="tokenizer.template-changes-message",
                    )
                at = start + len(words)
        images = sum(part.kind != "text" for message in messages for part in message.parts)
        word = getattr(self.processor, "image_token", None)
        if isinstance(word, str) and word and images != text.count(word):
            return TesseraError(
                f"the folder's chat template writes {text.count(word)} of {images} images",
                fix="remove such samples",
                code="tokenizer.template-image-count",
            )
        return None

    # ------------------------------------------------------------------------------------------ marks

    def _spans(
        self, messages: Sequence[Message], form: Form, plain: str, turns: Sequence[int], *, only_assistant: bool
    ) -> list[Span]:
        """Return the trained character ranges, one per turn. `plain`: the conversation rendered without marks."""
        if only_assistant and self._with_generation_marks is not None:
            text = self._render(self._chat(messages, form), jinja=self._with_generation_marks)
            marked_spans = self._clean(text, plain)
            if marked_spans is not None and _answers(plain, marked_spans, [messages[turn] for turn in turns]):
                return marked_spans
            raise TesseraError(
                f"the generation blocks of the folder's chat template do not enclose {len(turns)} answers",
                fix=MEND,
                code="tokenizer.generation-blocks-mismatch",
            )
        marked_spans = self._clean(self._render(self._chat(messages, form, turns)), plain)
        if marked_spans is None:
            raise TesseraError(
                "the folder's chat template changes the text of messages, so answers cannot be located",
                fix=MEND,
                code="tokenizer.template-changes-message",
            )
        return self._joined(messages, form, plain, turns, marked_spans)

    def _clean(self, text: str, plain: str) -> list[Span] | None:
        """Return the marked character ranges of `text`; None if `text` without marks differs from `plain`."""
        try:
            cleaned, spans = without_marks(text)
        except ValueError:
            return None
        return sorted(spans) if cleaned == plain else None

    def _joined(
        self, messages: Sequence[Message], form: Form, plain: str, turns: Sequence[int], marked_spans: Sequence[Span]
    ) -> list[Span]:
        """Return one range for each turn, from its first text to the special token that ends it."""
        spans: list[Span] = []
        remaining = iter(marked_spans)
        for turn in turns:
            parts = [next(remaining) for part in messages[turn].parts if part.kind == "text"]
            if not parts:
                raise TesseraError(
                    f"message {turn + 1} ({messages[turn].role}) is trained and contains no text",
                    fix="write an answer, or leave this role out of data.train_on",
                    code="data.empty-answer",
                )
            end = parts[-1][1]
            spans.append((parts[0][0], end + self._end_length(messages, form, plain, turn, end)))
        return spans

    def _end_length(self, messages: Sequence[Message], form: Form, plain: str, turn: int, end: int) -> int:
        """Return how many characters end a turn: those after its text, up to and with the last special token.

        Characters that the template writes only if another message follows are not part of the end.
        """
        after = plain[end:]
        if turn + 1 < len(messages):
            shorter = self._render(self._chat(messages[: turn + 1], form))
            if not shorter.startswith(plain[:end]):
                return 0
            after = _common(shorter[end:], after)
        words = list(self._control.finditer(after))
        return words[-1].end() if words else 0

    def _with_end(self, plain: str, spans: Sequence[Span]) -> str:
        """Add an end-of-text token if the last turn has no end token, so that the model learns to stop."""
        last = plain[spans[-1][0] : spans[-1][1]]
        if self._control.search(last) or not self.tokenizer.eos_token:
            return plain
        return plain[: spans[-1][1]] + str(self.tokenizer.eos_token)

    def stop_words(self) -> list[str]:
        """Return the tokens that end an answer in the folder's chat template."""
        said = [Message("user", (Part("text", "a"),)), Message("assistant", (Part("text", "b"),))]
        try:
            text, spans = without_marks(self.write(said, ("assistant",)))
        except TemplateLimit:
            raise
        except TesseraError:
            return []
        return [match[0] for match in self._control.finditer(text[spans[-1][0] : spans[-1][1]])]


def _as_python(messages: Sequence[Message], text: str) -> bool:
    """Return whether `text` contains lists of parts, such as [{'type': 'text'}], which a template wrote as they are."""
    said = [part.value for message in messages for part in message.parts if part.kind == "text"]
    return any(text.count(word) > sum(content.count(word) for content in said) for word in _AS_PYTHON)


def _answers(plain: str, spans: Sequence[Span], messages: Sequence[Message]) -> bool:
    """Return whether each character range of `plain` contains the texts of its message."""
    if len(spans) != len(messages):
        return False
    return all(
        part.value.strip() in plain[begin:end]
        for (begin, end), message in zip(spans, messages, strict=True)
        for part in message.parts
        if part.kind == "text"
    )


def _common(first: str, second: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return min(first, second, key=len) if length is None else first[:length]
