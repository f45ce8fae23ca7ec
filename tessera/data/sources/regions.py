"""Boxes, points and names of objects of a record, and their checks against the sizes of the images.

{"messages": [... "Find <ref-object>." ... "<bbox>"], "images": ["a.jpg"],
 "objects": {"ref": ["a dog"], "bbox": [[x1, y1, x2, y2] or [x, y], ...],
             "bbox_type": "real", "norm1" or "norm1000", "image_id": [index of the image of each bbox]}}

The n-th `<bbox>` of the texts stands for the n-th entry of `bbox`, and the same holds for `<ref-object>` and `ref`. The
family of the model writes them as its published models do. A record whose texts have no placeholder is unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tessera.core.sample import REGION, MediaSize, Message, Part, Region, Sample
from tessera.data.sources.container import fail
from tessera.data.sources.fields import text_of
from tessera.errors import TesseraError

SCALES = {"real": 0, "norm1": 1, "norm1000": 1000}
MOST = 1000  # limit of regions of a record; more of them show that an export is broken
_LARGEST = 1e7  # limit of coordinates; larger numbers are errors of the data
_NEAR = 1.0  # pixels that a box or point may reach out of its image, because annotations are rounded
_BOX = "<bbox>"


def with_regions(messages: tuple[Message, ...], objects: Any) -> tuple[Message, ...]:
    """Return messages whose texts have the regions of `objects`, a field of the record, or raise `RecordError`."""
    if objects is None:
        return messages
    texts = [part.value for message in messages for part in message.parts if part.kind == "text"]
    words = [word for text in texts for word in REGION.findall(text)]
    if not words:
        return messages
    if isinstance(objects, str):  # a cell of CSV or Parquet contains JSON as text
        try:
            objects = json.loads(objects)
        except (ValueError, RecursionError):
            fail("data.bad-objects", f"objects is a text that is no JSON: {objects!r:.60}")
    if not isinstance(objects, Mapping):
        fail("data.bad-objects", f"objects is a {type(objects).__name__}, not an object with 'ref' and 'bbox'")
    images = sum(part.kind == "image" for message in messages for part in message.parts)
    names, boxes = _names(objects), _boxes(objects, images)
    for word, count in ((_BOX, len(boxes)), ("<ref-object>", len(names))):
        if words.count(word) != count:
            fail("data.region-count", f"the texts have {words.count(word)} {word} placeholders, objects has {count}")
    remaining_names, remaining_boxes = iter(names), iter(boxes)

    def filled(part: Part) -> Part:
        if part.kind != "text":
            return part
        regions: list[Region] = []
        name = ""  # name of the object whose boxes follow
        for word, text in zip(REGION.findall(part.value), REGION.split(part.value), strict=False):
            name = "" if text.strip() else name
            region = next(remaining_names) if word != _BOX else replace(next(remaining_boxes), label=name)
            name = region.label
            regions.append(region)
        return replace(part, regions=tuple(regions)) if regions else part

    return tuple(Message(message.role, tuple(map(filled, message.parts))) for message in messages)


def _names(objects: Mapping[str, Any]) -> list[Region]:
    return [Region(label=text_of(name)) for name in _list(objects, "ref")]


def _boxes(objects: Mapping[str, Any], images: int) -> list[Region]:
    boxes, numbers = _list(objects, "bbox"), _list(objects, "image_id")
    unit = objects.get("bbox_type") or "real"
    if not isinstance(unit, str) or unit not in SCALES:
        fail("data.bad-objects", f"unknown bbox_type {unit!r:.40} (known: {', '.join(SCALES)})")
    if numbers and len(numbers) != len(boxes):
        fail("data.bad-objects", f"image_id has {len(numbers)} entries, bbox {len(boxes)}")
    regions = []
    for box, image in zip(boxes, numbers or [0] * len(boxes), strict=True):
        if not isinstance(box, (list, tuple)) or len(box) not in (2, 4):
            fail("data.bad-objects", f"a bbox must be [x1, y1, x2, y2] or [x, y], got {_short(box)}")
        if not all(_is_coordinate(number) for number in box):
            fail("data.bad-objects", f"a bbox has a value that is no coordinate: {_short(box)}")
        if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < images:
            fail("data.region-image", f"image_id {_short(image)} of a bbox: the row has {images} images, from 0")
        regions.append(Region(tuple(map(float, box)), image=image, scale=SCALES[unit]))
    return regions


def _list(objects: Mapping[str, Any], key: str) -> Sequence[Any]:
    values = objects.get(key)
    if values is None:
        return []
    if not isinstance(values, (list, tuple)):
        fail("data.bad-objects", f"{key!r} of objects is a {type(values).__name__}, not a list")
    if len(values) > MOST:
        fail("data.bad-objects", f"{key!r} of objects has {len(values)} entries, at most {MOST} are allowed")
    return values


def _is_coordinate(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST  # False for NaN as well


def _short(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (int, float, str, type(None))) else f"{str(value)[:60]}"


# ---------------------------------------------------------------------------------------------- images


def without_regions(message: Message) -> Message:
    return replace(message, parts=tuple(replace(part, regions=()) for part in message.parts))


def regions_of(sample: Sample) -> Iterator[Region]:
    """Yield the boxes and points of a sample, in order."""
    for message in sample.messages:
        for part in message.parts:
            yield from (region for region in part.regions if region.numbers)


def objects_of(sample: Sample) -> dict[str, Any]:
    """Return the regions of a sample as the field `objects` of a record: {"objects": ...}, or {} without regions."""
    names = [r.label for m in sample.messages for part in m.parts for r in part.regions if not r.numbers]
    boxes = list(regions_of(sample))
    if not names and not boxes:
        return {}
    unit = next((unit for unit, scale in SCALES.items() if boxes and scale == boxes[0].scale), "real")
    places = {"bbox": [list(box.numbers) for box in boxes], "image_id": [box.image for box in boxes]}
    return {"objects": {"ref": names, **places, "bbox_type": unit}}


def inside(region: Region, size: MediaSize) -> tuple[float, ...]:
    """Return a box or point in pixels, clipped to its image. Raise if it lies outside of the image."""
    pixels = region.pixels(size)
    sides = (size.width, size.height)
    cut = tuple(min(max(number, 0.0), float(sides[n % 2])) for n, number in enumerate(pixels))
    if len(cut) == 4 and cut[0] < cut[2] and cut[1] < cut[3]:
        return cut
    if len(cut) == 2 and max(abs(a - b) for a, b in zip(cut, pixels, strict=True)) <= _NEAR:
        return cut
    if len(cut) == 4 and (pixels[0] >= pixels[2] or pixels[1] >= pixels[3]):
        why = "has no area: x1 < x2 and y1 < y2 must hold ([x, y, width, height] is another form)"
    else:
        kind, why = oddity(region, size) or ("", "")
        why = f"is outside of the image of {size.width}x{size.height}" + (f": {why}" if kind != "box-outside" else "")
    fail("data.region-outside", f"the bbox {_spelled(region)} {why}")


def oddity(region: Region, size: MediaSize) -> tuple[str, str] | None:
    """Return the kind of finding for a box or point that is probably wrong, and why; None if it is plausible."""
    x, y = region.numbers[::2], region.numbers[1::2]
    if region.scale:
        beyond = max(*x, *y) > 1.5 * region.scale
        if beyond:
            return "box-unit", f"{_spelled(region)} has numbers over {region.scale}: bbox_type real means pixels"
    elif max(*x, *y) <= 1 and min(size.width, size.height) > 2:
        return "box-unit", f"{_spelled(region)} is smaller than a pixel: bbox_type norm1 means 0..1"
    pixels = region.pixels(size)
    if _outside(pixels, size.width, size.height) <= _NEAR:
        return None
    if not region.scale and _outside(pixels, size.height, size.width) <= _NEAR:
        return "box-swapped", f"{_spelled(region)} fits into {size.width}x{size.height} with x and y exchanged"
    return "box-outside", f"{_spelled(region)} in an image of {size.width}x{size.height}"


def _outside(pixels: Sequence[float], width: int, height: int) -> float:
    """Return how many pixels a box or point reaches beyond the edges of an image."""
    x, y = pixels[::2], pixels[1::2]
    return max(-min(x), -min(y), max(x) - width, max(y) - height)


def _spelled(region: Region) -> str:
    unit = f" of 0..{region.scale}" if region.scale else ""
    return "[" + ", ".join(f"{number:g}" for number in region.numbers) + "]" + unit


def check_regions(sample: Sample, sizes: Sequence[MediaSize]) -> list[MediaSize]:
    """Return the sizes of the images of a sample. Raise if a box has no image, or lies outside of it.

    `sizes`: of all media of the sample.
    """
    images = [size for part, size in zip(sample.media(), sizes, strict=True) if part.kind == "image"]
    for region in regions_of(sample):
        if region.image >= len(images):
            what = f"a bbox is in image {region.image}, which is not in the turns before it"
            raise TesseraError(what, code="data.region-image")
        inside(region, images[region.image])
    return images
