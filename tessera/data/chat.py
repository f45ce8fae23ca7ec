"""How a conversation is written down for a model: a template as data, rendered into pieces.

A piece is text or one special word, and knows whether the model is trained to write it: what a trained role says and
the word that ends its turn are, headers and everyone else are not. The same template as Jinja goes into exported
folders, so that other tools write conversations the same way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tessera.core.types import Message

MediaKind = Literal["image", "video"]


@dataclass(frozen=True)
class Piece:
    """`special`: `text` is one word of the vocabulary; otherwise it is plain text, whatever it looks like."""

    text: str
    role: str
    trained: bool = False
    special: bool = False
    media: MediaKind | None = None  # this special word is repeated as often as the media needs


@dataclass(frozen=True)
class ChatTemplate:
    """The ChatML family: <start>role\\n content <end>\\n for each message."""

    start: str = "<|im_start|>"
    end: str = "<|im_end|>"
    media_before: str = "<|vision_start|>"
    media_after: str = "<|vision_end|>"
    media_words: dict[MediaKind, str] = field(
        default_factory=lambda: {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    )
    system: str | None = "You are a helpful assistant."  # said first when the conversation has no system message

    def special_words(self) -> list[str]:
        return [self.start, self.end, self.media_before, self.media_after, *self.media_words.values()]

    def render(
        self, messages: Sequence[Message], train_on: Collection[str] = ("assistant",), answer: bool = False
    ) -> list[Piece]:
        """`answer`: end with the header of the assistant's next turn, for a model to go on from."""
        pieces: list[Piece] = []
        if self.system is not None and (not messages or messages[0].role != "system"):
            pieces += self._turn("system", [Piece(self.system, "system")], trained=False)
        for message in messages:
            trained = message.role in train_on
            pieces += self._turn(message.role, self._content(message, trained), trained)
        if answer:
            pieces += [Piece(self.start, "assistant", special=True), Piece("assistant\n", "assistant")]
        return pieces

    def _turn(self, role: str, content: Iterable[Piece], trained: bool) -> list[Piece]:
        return [
            Piece(self.start, role, special=True),
            Piece(role + "\n", role),
            *content,
            Piece(self.end, role, trained, special=True),
            Piece("\n", role),
        ]

    def _content(self, message: Message, trained: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for part in message.parts:
            if part.kind == "text":
                pieces.append(Piece(part.value, message.role, trained))
            else:  # a model reads pictures, it does not write their placeholders
                pieces += [
                    Piece(self.media_before, message.role, special=True),
                    Piece(self.media_words[part.kind], message.role, special=True, media=part.kind),
                    Piece(self.media_after, message.role, special=True),
                ]
        return pieces

    def system_in(self, jinja: str) -> str | None:
        """What a folder's own template says first when a conversation has no system message: `jinja` read backwards."""
        found = re.search(re.escape(f"{self.start}system\n") + "(.*?)" + re.escape(self.end), jinja, re.DOTALL)
        return None if found is None else found[1].removeprefix("{% raw %}").removesuffix("{% endraw %}")

    def jinja(self) -> str:
        """The same, for tools that read a chat template from the tokenizer's folder."""
        media = "".join(
            "{% " + ("if" if kind == "image" else "elif") + f" part.type == '{kind}' or '{kind}' in part"
            f"{extra} %}}{self.media_before}{word}{self.media_after}"
            for (kind, word), extra in zip(self.media_words.items(), (" or 'image_url' in part", ""), strict=True)
        )
        system = self.system or ""
        if "{" in system:  # a prompt may speak of templates without being one
            system = "{% raw %}" + system + "{% endraw %}"
        opening = (
            f"{{% if loop.first and message.role != 'system' %}}{self.start}system\n{system}{self.end}\n{{% endif %}}"
        )
        return (
            "{% for message in messages %}"
            + ("" if self.system is None else opening)
            + f"{self.start}{{{{ message.role }}}}\n"
            + "{% if message.content is string %}{{ message.content }}"
            + "{% else %}{% for part in message.content %}"
            + media
            + "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
            + f"{self.end}\n"
            + "{% endfor %}"
            + f"{{% if add_generation_prompt %}}{self.start}assistant\n{{% endif %}}"
        )
