"""How families write boxes and points of an image in text, and how they are read from an answer.

Published models were trained with different scales (0..1000, 0..1, pixels of the resized image) and different words. A
family's processor has a `Grounding`, which states both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tessera.core.sample import REGION, Part, Region
from tessera.models.processing.chat import ChatSpan

MOST = 1000  # maximum number of regions that are read from an answer
_NUMBER = r"\s{0,9}(-?\d{1,7}(?:\.\d{1,9})?)\s{0,9}"
# Matches any bracket around numbers, because a decoded answer lacks special tokens around a box.
_READ = re.compile(
    rf"\({_NUMBER},{_NUMBER}\)\s{{0,9}},?\s{{0,9}}\({_NUMBER},{_NUMBER}\)"
    rf"|[\[(<{{]{_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?[\])>}}]"
)
_LABEL_AFTER = re.compile(r'^[^{}\[\]]{0,40}"label"\s{0,9}:\s{0,9}"([^"\\]{1,200})"')
_LABEL_BEFORE = re.compile(r"(?:<ref>|<\|object_ref_start\|>)([^<>]{1,200})(?:</ref>|<\|object_ref_end\|>)[^<>]{0,9}")


@dataclass(frozen=True)
class BoxScale:
    """Convert pixels of an image to the numbers of a family: (pixel + margin) * units per pixel."""

    across: float
    down: float
    margin_left: float = 0.0
    margin_top: float = 0.0

    def numbers(self, pixels: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            (p + (self.margin_top if n % 2 else self.margin_left)) * self._units(n) for n, p in enumerate(pixels)
        )

    def pixels(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            v / self._units(n) - (self.margin_top if n % 2 else self.margin_left) for n, v in enumerate(numbers)
        )

    def _units(self, n: int) -> float:
        return self.down if n % 2 else self.across


@dataclass(frozen=True)
class Grounding:
    """Define how a family writes boxes and points.

    `box`, `point`: texts with a placeholder for each number. `around`, `around_name`: texts before and after a box or
    point, and those for the name of an object; they are special tokens if the tokenizer has them.
    """

    scale: int = 1000  # coordinate of the right and lower edges of an image; 0: pixels of the resized image
    decimals: int = 0
    box: str = "[{}, {}, {}, {}]"
    point: str = "[{}, {}]"
    around: tuple[str, str] = ("", "")
    around_name: tuple[str, str] = ("", "")
    # Whether a text of regions only is written as a JSON list of {"bbox_2d": [...], "label": ...} in a Markdown block.
    json: bool = False

    def write(
        self,
        part: Part,
        span: ChatSpan,
        numbers: Callable[[Region], Sequence[float]],
        is_token: Callable[[str], bool],
    ) -> list[ChatSpan]:
        """Return the spans of a text with regions.

        `span`: role and training of the text. `numbers`: returns the numbers of a region in the family's scale.
        """

        def spans(text: str, mark: bool = False) -> list[ChatSpan]:
            return [ChatSpan(text, span.role, span.trained, special=mark and is_token(text))] if text else []

        texts = REGION.split(part.value)
        if self.json and not "".join(texts).strip() and any(region.numbers for region in part.regions):
            return [ChatSpan(self._list(part.regions, numbers), span.role, span.trained)]
        out = spans(texts[0])
        for region, text in zip(part.regions, texts[1:], strict=True):
            before, after = self.around if region.numbers else self.around_name
            word = self._spelled(numbers(region)) if region.numbers else region.label
            out += [*spans(before, mark=True), *spans(word), *spans(after, mark=True), *spans(text)]
        return out

    def _spelled(self, numbers: Sequence[float]) -> str:
        form = self.point if len(numbers) == 2 else self.box
        return form.format(*(f"{number:.{self.decimals}f}" for number in numbers))

    def _list(self, regions: Sequence[Region], numbers: Callable[[Region], Sequence[float]]) -> str:
        rows = []
        for region in (region for region in regions if region.numbers):
            key = "point_2d" if len(region.numbers) == 2 else "bbox_2d"
            label = f', "label": {json.dumps(region.label, ensure_ascii=False)}' if region.label else ""
            rows.append(f'\t{{"{key}": {self._spelled(numbers(region))}{label}}}')
        return "```json\n[\n" + ",\n".join(rows) + "\n]\n```"


def read_numbers(answer: str, points: bool = True) -> Iterator[tuple[tuple[float, ...], str]]:
    """Yield each box of an answer, and with `points` each point: its numbers, unscaled, and the object's name or ""."""
    start = 0
    for count, match in enumerate(_READ.finditer(answer)):
        numbers = tuple(float(number) for number in match.groups() if number is not None)
        if count == MOST:
            return
        before, after = answer[start : match.start()], answer[match.end() : match.end() + 260]
        start = match.end()
        label = _LABEL_AFTER.search(after) or next(reversed(list(_LABEL_BEFORE.finditer(before[-260:]))), None)
        if points or len(numbers) == 4:
            yield numbers, label[1] if label else ""
