"""Split the text of an answer into reasoning and content while it streams.

Families that reason write `<think>` reasoning `</think>` content. GLM-4.1V puts the content between `<answer>` tags.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["reasoning", "content"]
State: TypeAlias = Literal["start", "reasoning", "behind", "answer", "content"]

_THINK, _END = "<think>", "</think>"
_ANSWER, _END_ANSWER = "<answer>", "</answer>"
# Whether a family writes <answer> tags.
_FAMILIES = {"qwen3": False, "qwen3_omni": False, "qwen3_vl": False, "internvl": False, "glm4v": True}


def reasoning_for(family: str, prompt: str) -> ReasoningSplitter | None:
    """Return a splitter for the answer to a prompt, or None for families that do not reason.

    `prompt`: the text of the prompt, or its end. Some chat templates end it with the opening tag of the reasoning.
    """
    if family not in _FAMILIES:
        return None
    return ReasoningSplitter(prompt.rstrip().endswith(_THINK), answer_tags=_FAMILIES[family])


class ReasoningSplitter:
    """Split text into reasoning and content. The result does not depend on the parts in which the text arrives.

    Reasoning counts only at the beginning of an answer. Tags and the whitespace around them are left out.
    `opened`: the prompt ends with `<think>`. `answer_tags`: leave out `<answer>` tags around the content.
    """

    def __init__(self, opened: bool, *, answer_tags: bool = False) -> None:
        self._opened = opened
        self._answer_tags = answer_tags
        self._text = ""  # text that is not yet returned
        self._state: State = "start"
        self._trims = False  # whether leading whitespace of the next text is removed

    def add(self, text: str) -> list[tuple[Kind, str]]:
        """Add text. Return the parts that later text cannot change."""
        self._text += text
        parts: list[tuple[Kind, str]] = []
        state = None
        while self._text and state != self._state:
            state = self._state
            if self._trims:
                self._text = self._text.lstrip()
                self._trims = not self._text
            if state == "start":
                self._begin(_THINK, "reasoning", "reasoning" if self._opened else "content")
            elif state == "reasoning":
                self._until(_END, "reasoning", "behind", parts)
            elif state == "behind" and self._answer_tags:
                self._begin(_ANSWER, "answer", "content")
            elif state == "answer":
                self._until(_END_ANSWER, "content", "content", parts)
            elif self._text:
                self._state = "content"
                parts.append(("content", self._text))
                self._text = ""
        return parts

    def close(self) -> list[tuple[Kind, str]]:
        """End the text. Return the parts that were held back."""
        text, self._text = self._text, ""
        kind: Kind = (
            "reasoning" if self._state == "reasoning" or (self._state == "start" and self._opened) else "content"
        )
        return [(kind, text)] if text else []

    def _begin(self, tag: str, inside: State, otherwise: State) -> None:
        """Remove a tag at the beginning of the text; wait for more text if it may still become a tag."""
        text = self._text.lstrip()
        if text.startswith(tag):
            self._text, self._state, self._trims = text.removeprefix(tag), inside, True
        elif not tag.startswith(text):
            self._state = otherwise
            self._trims = otherwise == "reasoning"

    def _until(self, tag: str, kind: Kind, behind: State, parts: list[tuple[Kind, str]]) -> None:
        """Return the text before a tag.

        Whitespace before the tag, and a possible beginning of the tag, are held back.
        """
        at = self._text.find(tag)
        end = len(self._text[: at if at >= 0 else _beginning_of(tag, self._text)].rstrip())
        if end:
            parts.append((kind, self._text[:end]))
        self._text = self._text[at + len(tag) :] if at >= 0 else self._text[end:]
        if at >= 0:
            self._state = behind
            self._trims = behind == "behind"


def _beginning_of(tag: str, text: str) -> int:
    """Return the start of the longest suffix of a text that is a prefix of a tag."""
    length = next(length for length in range(len(tag) - 1, -1, -1) if text.endswith(tag[:length]))
    return len(text) - length
