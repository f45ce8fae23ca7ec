"""Find the boxes that an answer names, in the words of the families that write boxes.

<|object_ref_start|>a cat<|object_ref_end|><|box_start|>(10,20),(300,400)<|box_end|>    Qwen2-VL, in thousandths
<ref>a cat</ref><box>[[10, 20, 300, 400]]</box>                                         InternVL, in thousandths
{"bbox_2d": [10, 20, 300, 400], "label": "a cat"}       Qwen2.5-VL in pixels, Qwen3-VL in thousandths
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_BOXES = 50  # of an answer
_NUMBER = r"\s*(-?\d{1,6}(?:\.\d{1,6})?)\s*"
_FOUR = ",".join([_NUMBER] * 4)
# Special tokens may be gone from a decoded answer, so they may be missing here.
_QWEN2 = re.compile(
    r"(?:<\|object_ref_start\|>(?P<label>[^<]{0,200})<\|object_ref_end\|>)?(?:<\|box_start\|>)?"
    rf"\({_NUMBER},{_NUMBER}\)\s*,\s*\({_NUMBER},{_NUMBER}\)"
)
_INTERN = re.compile(r"(?:<ref>(?P<label>[^<]{0,200})</ref>\s*)?<box>\s*\[(?P<boxes>[^<]{0,4000})\]\s*</box>")
_INNER = re.compile(rf"\[?{_FOUR}\]?")
_JSON = re.compile(rf'\{{[^{{}}]{{0,400}}?"bbox(?:_2d)?"\s*:\s*\[{_FOUR}\][^{{}}]{{0,400}}\}}')
_LABEL = re.compile(r'"label"\s*:\s*"([^"]{0,200})"')


@dataclass(frozen=True)
class Box:
    """Hold a box in shares of the width and the height of its image."""

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""


def find_boxes(text: str, size: tuple[int, int], pixels: bool = False) -> list[Box]:
    """Return the boxes in an answer. `size`: width and height of the image as the model saw it; `pixels`: boxes in JSON
    are in its pixels, and in thousandths otherwise. What is no box, such as a corner left of itself, is passed over."""
    found: list[Box] = []
    for label, corners, of_json in _corners(text[:100_000]):
        wide, high = size if pixels and of_json else (1000, 1000)
        left, right = _inside(corners[0] / wide), _inside(corners[2] / wide)
        top, bottom = _inside(corners[1] / high), _inside(corners[3] / high)
        if left < right and top < bottom:
            found.append(Box(left, top, right, bottom, label.strip()))
        if len(found) == MOST_BOXES:
            break
    return found


def _corners(text: str) -> Iterator[tuple[str, tuple[float, float, float, float], bool]]:
    for match in _QWEN2.finditer(text):
        yield match["label"] or "", _floats(match.groups()[-4:]), False
    for match in _INTERN.finditer(text):
        for inner in _INNER.finditer(match["boxes"]):
            yield match["label"] or "", _floats(inner.groups()), False
    for match in _JSON.finditer(text):
        label = _LABEL.search(match[0])
        yield label[1] if label else "", _floats(match.groups()), True


def _floats(texts: tuple[str, ...]) -> tuple[float, float, float, float]:
    left, top, right, bottom = map(float, texts)
    return left, top, right, bottom


def _inside(share: float) -> float:
    return min(1.0, max(0.0, share))
