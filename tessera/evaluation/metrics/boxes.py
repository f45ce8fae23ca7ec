"""Score boxes: intersection over union, the share above thresholds, and whether the centre is in the right box.

Boxes are x1, y1, x2, y2. Families of models write them in different units: shares of the image from 0 to 1,
thousandths, pixels, or PaliGemma's `<loc0000>` to `<loc1023>` in the order y1, x1, y2, x2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tessera.data.sources.container import RecordError
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark

Box = tuple[float, float, float, float]
Unit = Literal["shares", "thousandths", "pixels", "loc", "any", "size"]

_PLAIN = r"(-?\d+(?:\.\d+)?)"
_BRACKETS = re.compile(rf"\[\s*{_PLAIN},\s*{_PLAIN},\s*{_PLAIN},\s*{_PLAIN}\s*\]")
_RUN = re.compile(rf"{_PLAIN}\s*[,\s]\s*{_PLAIN}\s*[,\s]\s*{_PLAIN}\s*[,\s]\s*{_PLAIN}")
_CORNERS = re.compile(rf"\(\s*{_PLAIN}\s*,\s*{_PLAIN}\s*\)\s*,?\s*\(\s*{_PLAIN}\s*,\s*{_PLAIN}\s*\)")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_LOOSE = re.compile(rf"\[\s*({_NUMBER})[\s,]+({_NUMBER})[\s,]+({_NUMBER})[\s,]+({_NUMBER})\s*\]")
_LOC = re.compile(r"<loc(\d{4})>\s*<loc(\d{4})>\s*<loc(\d{4})>\s*<loc(\d{4})>")
_KEYS = ("bbox_2d", "bbox", "box", "coordinates", "coord", "location", "position")
_MAX_BOXES = 1000


def iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the area that two boxes share, divided by the area that they cover together."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (first, second)]
    union = sum(areas) - shared
    return shared / union if union > 0 else 0.0


def _scaled(box: Sequence[float], width: float, height: float) -> Box:
    return box[0] * width, box[1] * height, box[2] * width, box[3] * height


def _json_boxes(data: Any) -> Iterator[Box]:
    if isinstance(data, list):
        if _is_box(data):
            yield tuple(map(float, data))  # type: ignore[misc]
        else:
            for item in data:
                yield from _json_boxes(item)
    elif isinstance(data, dict):
        box = next((data[key] for key in _KEYS if _is_box(data.get(key))), None)
        yield from _json_boxes(list(data.values()) if box is None else box)


def _is_box(data: Any) -> bool:
    numbers = isinstance(data, list) and len(data) == 4
    return numbers and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in data)


def boxes_of(answer: str) -> list[Box]:
    """Return the boxes in an answer: those in JSON, else all runs of four numbers, else all pairs (x, y), (x, y)."""
    block = re.search(r"```(?:json)?\s*(.*?)```", answer, re.DOTALL | re.IGNORECASE)
    texts = [block[1]] if block else []
    texts += [answer, *(answer[answer.find(a) : answer.rfind(b) + 1] for a, b in ("[]", "{}") if a in answer)]
    for text in texts:
        try:
            boxes = list(_json_boxes(json.loads(text)))[:_MAX_BOXES]
        except (ValueError, RecursionError, OverflowError):
            continue
        if boxes:
            return boxes
        break
    matches = [*_RUN.finditer(answer)] or _CORNERS.finditer(answer)
    return [_numbers(match) for match in matches][:_MAX_BOXES]


def _numbers(match: re.Match[str]) -> Box:
    first, second, third, fourth = map(float, match.groups())
    return first, second, third, fourth


def predicted(answer: str, unit: Unit, width: int, height: int) -> list[Box]:
    """Return the boxes of an answer in pixels: the first one, or none.

    Unit `any`: all boxes, each once as pixels and once as thousandths of the image.
    """
    if unit == "loc":
        match = _LOC.search(answer)
        if match is None:
            return []
        y1, x1, y2, x2 = (value / 1024 for value in _numbers(match))
        return [_scaled((x1, y1, x2, y2), width, height)]
    if unit == "any":
        return [scaled for box in boxes_of(answer) for scaled in (box, _scaled(box, width / 1000, height / 1000))]
    if unit == "size":
        match = _LOOSE.search(answer)
        numbers = match.groups() if match else tuple(re.findall(_NUMBER, answer)[:4])
        if len(numbers) < 4:
            return []
        x1, y1, x2, y2 = map(float, numbers)
        largest = max(map(abs, (x1, y1, x2, y2)))
        scale = (width, height) if largest <= 1.5 else (width / 1000, height / 1000) if largest <= 1000 else (1, 1)
        box = _scaled((x1, y1, x2, y2), *scale)
        xs, ys = sorted((box[0], box[2])), sorted((box[1], box[3]))
        xs, ys = [min(max(x, 0.0), width) for x in xs], [min(max(y, 0.0), height) for y in ys]
        return [(xs[0], ys[0], xs[1], ys[1])]
    match = _BRACKETS.search(answer)
    if match is None and unit != "shares":  # the published rule for shares reads only numbers in square brackets
        return _in_unit(boxes_of(answer)[:1], unit, width, height)
    return _in_unit([_numbers(match)] if match else [], unit, width, height)


def _in_unit(boxes: list[Box], unit: Unit, width: int, height: int) -> list[Box]:
    scales = {"shares": (width, height), "thousandths": (width / 1000, height / 1000), "pixels": (1.0, 1.0)}
    return [_scaled(box, *scales[unit]) for box in boxes]


def boxes(
    *,
    unit: Unit = "shares",
    thresholds: tuple[float, ...] = (0.5, 0.1, 0.3, 0.7, 0.9),
    expected: Literal["xywh", "xyxy"] = "xywh",
) -> AnswerMetric:
    """Score a box by its intersection over union with the expected one.

    `unit`: the unit in which the model writes boxes. `any`: each box of the answer is read as pixels and as
    thousandths, and the best result counts. `size`: the largest number decides between shares, thousandths and pixels.
    `expected`: format of the field `box`, which is in pixels.
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        wanted, width, height = _expected_box(question, expected)
        candidates = [box for box in predicted(answer, unit, width, height) if all(map(math.isfinite, box))]
        best = max(candidates, key=lambda box: iou(box, wanted), default=None)
        score = 0.0 if best is None else iou(best, wanted)
        x, y = (0.0, 0.0) if best is None else ((best[0] + best[2]) / 2, (best[1] + best[3]) / 2)
        values = {f"acc@{threshold:g}": float(score >= threshold) for threshold in thresholds}
        values |= {"iou": score, "centre": float(wanted[0] <= x <= wanted[2] and wanted[1] <= y <= wanted[3])}
        text = None if best is None else ", ".join(f"{value:.4g}" for value in best)
        return Mark(text, values | {"no box": float(best is None)})

    return AnswerMetric("boxes", mark)


def _expected_box(question: BenchmarkQuestion, form: str) -> tuple[Box, int, int]:
    """Return the expected box in pixels, and width and height of the image."""
    fields = question.fields
    try:
        x1, y1, x2, y2 = (float(value) for value in fields["box"])
        width, height = int(float(fields["width"])), int(float(fields["height"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        what = "the row has no box of four numbers, or no width and height"
        raise RecordError(what, where=question.id, code="evaluation.bad-box") from None
    if form == "xywh":
        x2, y2 = x1 + x2, y1 + y2
    if not (all(map(math.isfinite, (x1, y1, x2, y2))) and x1 < x2 and y1 < y2 and width > 0 and height > 0):
        raise RecordError(
            "the expected box or its image has no area", where=question.id, code="evaluation.bad-box"
        ) from None
    return (x1, y1, x2, y2), width, height
