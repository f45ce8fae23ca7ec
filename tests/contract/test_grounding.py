"""Boxes and points as each family writes them, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import VOCAB, WORDS, picture, write_words
from processor_families import PROCESSORS

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Region, Sample
from tessera.data.sources.regions import with_regions

SIZE = MediaSize(200, 100)
NAMES = sorted(PROCESSORS)


def grounded(question: str, answer: str, images: int = 1, **objects: Any) -> Sample:
    stills = [Part("image", None)] * images
    messages = (
        Message("user", (*stills, Part("text", question))),
        Message("assistant", (Part("text", answer),)),
    )
    return Sample("one", with_regions(messages, objects))


def answer_of(name: str, answer: str, **objects: Any) -> str:
    """The text that the loss includes, special tokens and the end of the turn left out."""
    processor = PROCESSORS[name].processor
    encoded = processor.encode(grounded("Where?", answer, **objects), [picture(SIZE.width, SIZE.height)])
    words = processor.spell(encoded.labels[encoded.labels != IGNORE].tolist())
    for word in (*processor.template.stop_words, *processor.template.next_turns):
        words = words.replace(word, "")
    return str(words).strip()


# Qwen2.5-VL resizes an image of 200 x 100 pixels to 196 x 112, in blocks of 28 pixels.
INLINE = {
    "qwen2_vl": "<|object_ref_start|>a dog<|object_ref_end|> at <|box_start|>(100,200),(500,900)<|box_end|>",
    "qwen2_5_vl": "a dog at [20, 22, 98, 101]",
    "qwen3_vl": "a dog at [100, 200, 500, 900]",
    "internvl": "<ref>a dog</ref> at <box>[[100, 200, 500, 900]]</box>",
    "glm4v": "a dog at <|begin_of_box|>[[100, 200, 500, 900]]<|end_of_box|>",
    "llava": "a dog at [0.10, 0.20, 0.50, 0.90]",
    "llava_onevision": "a dog at [0.10, 0.20, 0.50, 0.90]",
}
ALONE = {
    "qwen2_vl": "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(100,200),(500,900)<|box_end|>"
    "<|box_start|>(250,500)<|box_end|>",
    "qwen2_5_vl": '```json\n[\n\t{"bbox_2d": [20, 22, 98, 101], "label": "a dog"},\n'
    '\t{"point_2d": [49, 56], "label": "a dog"}\n]\n```',
    "qwen3_vl": '```json\n[\n\t{"bbox_2d": [100, 200, 500, 900], "label": "a dog"},\n'
    '\t{"point_2d": [250, 500], "label": "a dog"}\n]\n```',
    "internvl": "<ref>a dog</ref><box>[[100, 200, 500, 900]]</box><box>[[250, 500]]</box>",
    "glm4v": "a dog<|begin_of_box|>[[100, 200, 500, 900]]<|end_of_box|><|begin_of_box|>[[250, 500]]<|end_of_box|>",
    "llava": "a dog[0.10, 0.20, 0.50, 0.90][0.25, 0.50]",
    "llava_onevision": "a dog[0.10, 0.20, 0.50, 0.90][0.25, 0.50]",
}
SAME_AS = {"qwen2_5_omni": "qwen2_5_vl", "qwen3_omni": "qwen3_vl"}
BOX = [20, 20, 100, 90]


@pytest.mark.parametrize("name", NAMES)
def test_the_family_writes_its_own_words(name: str) -> None:
    objects = {"ref": ["a dog"], "bbox": [BOX]}
    words = SAME_AS.get(name, name)
    assert answer_of(name, "<ref-object> at <bbox>", **objects) == INLINE[words]
    objects = {"ref": ["a dog"], "bbox": [BOX, [50, 50]]}
    assert answer_of(name, "<ref-object><bbox><bbox>", **objects) == ALONE[words]


@pytest.mark.parametrize("name", NAMES)
def test_other_units_give_the_same_text(name: str) -> None:
    real = answer_of(name, "<bbox>", bbox=[BOX])
    assert answer_of(name, "<bbox>", bbox=[[0.1, 0.2, 0.5, 0.9]], bbox_type="norm1") == real
    assert answer_of(name, "<bbox>", bbox=[[100, 200, 500, 900]], bbox_type="norm1000") == real


def test_boxes_of_llava_are_in_the_square_that_an_image_is_padded_to() -> None:
    processor = PROCESSORS["llava"].processor
    processor = replace(processor, squares=replace(processor.squares, pad=True))
    message = grounded("?", "<bbox>", bbox=[BOX]).messages[1]
    text = processor.answer_text(message, [SIZE])
    assert text == "[0.10, 0.35, 0.50, 0.70]"  # 50 rows of padding above 100 rows
    (region,) = processor.read_boxes(text, SIZE)
    assert region.numbers == pytest.approx(BOX)
    assert processor.answer_text(message, [MediaSize(100, 200)]) == "[0.35, 0.10, 0.75, 0.45]"


@pytest.mark.parametrize("name", NAMES)
def test_pixels_come_back_within_half_a_unit(name: str) -> None:
    processor, chance = PROCESSORS[name].processor, np.random.default_rng(0)
    for _ in range(60):
        size = MediaSize(*map(int, chance.integers(20, 900, 2)))
        x, y = np.sort(chance.random(2)) * size.width, np.sort(chance.random(2)) * size.height
        boxes = [[x[0], y[0], x[1], y[1]], [0, 0, size.width, size.height]]
        points = [[x[0], y[1]], [size.width, size.height]]
        sample = grounded("?", "<bbox>, <bbox>, <bbox> and <bbox>", bbox=[*boxes, *points])
        text = processor.answer_text(sample.messages[1], [size])
        read = processor.read_boxes(text, size)
        scale = processor.box_scale(size)
        half = 0.5 * 10.0**-processor.grounding.decimals * (1 + 1e-9)
        for region, wanted in zip(read, [*boxes, *points], strict=True):
            units = [(scale.across, scale.down)[n % 2] for n in range(len(wanted))]
            off = [abs(a - b) * u for a, b, u in zip(region.numbers, wanted, units, strict=True)]
            assert max(off) <= half, (size, wanted, text)
        assert [region.numbers for region in processor.read_boxes(text, size, points=False)] == [
            region.numbers for region in read[:2]
        ]


@pytest.mark.parametrize("name", NAMES)
def test_the_index_counts_the_tokens_of_training(name: str) -> None:
    processor = PROCESSORS[name].processor
    sample = grounded(
        "Find <ref-object> near <bbox>.",
        "<ref-object><bbox> in the second",
        images=2,
        ref=["a dog", "a tall man"],
        bbox=[[1, 2, 30, 40], [5, 5, 299, 39]],
        image_id=[0, 1],
    )
    images = [picture(200, 100), picture(300, 40)]
    encoded = processor.encode(sample, images)
    measured = processor.measure(sample, [MediaSize(*image.size) for image in images])
    assert measured["tokens"] == len(encoded.tokens)
    assert measured["trained"] == int((encoded.labels[1:] != IGNORE).sum())
    # An image that was decoded at a lower resolution has the boxes of its header.
    small = [image.resize((image.width // 2, image.height // 2)) for image in images]
    sizes = [MediaSize(*image.size) for image in images]
    assert processor.encode(sample, small, sizes).tokens.tolist() == encoded.tokens.tolist()
    other = replace(sample, messages=(sample.messages[0], Message("assistant", (Part("text", "no"),))))
    prompts = [processor.prompt([each], [images], [sizes])["tokens"] for each in (sample, other)]
    assert torch.equal(*prompts)


def test_words_that_are_special_tokens_are_trained_as_such(tmp_path: Path) -> None:
    marks = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>")
    processor = PROCESSORS["qwen2_vl"].load(write_words(tmp_path, VOCAB, (*marks, *WORDS)))
    sample = grounded("Where is <|box_start|>?", "<ref-object><bbox>", ref=["<|box_end|>"], bbox=[BOX])
    encoded = processor.encode(sample, [picture(200, 100)])
    tokens, labels = encoded.tokens.tolist(), encoded.labels.tolist()
    for word in marks:  # the same characters in a question or in a name stay text
        assert tokens.count(processor.encoder.id_of(word)) == labels.count(processor.encoder.id_of(word)) == 1
    text = processor.answer_text(sample.messages[1], [SIZE])
    assert text == processor.decode([token for token in labels if token != IGNORE]).strip()
    assert text == "<|box_end|>(100,200),(500,900)"
    assert [region.numbers for region in processor.read_boxes(text, SIZE)] == [tuple(map(float, BOX))]


def test_text_without_placeholders_is_unchanged() -> None:
    messages = (Message("user", (Part("text", "a <box> and [1, 2]"),)),)
    assert with_regions(messages, {"bbox": "anything", "categories": [1]}) is messages
    marked = (Message("user", (Part("text", "a <bbox>"),)),)
    assert with_regions(marked, None) is marked


@pytest.mark.parametrize(
    ("answer", "numbers"),
    [
        ("<|box_start|>(100, 200), (500,900)<|box_end|>", [(20, 20, 100, 90)]),
        ("[[100,200,500,900],[0,0,1000,1000]]", [(20, 20, 100, 90), (0, 0, 200, 100)]),
        ("<100, 200, 500, 900> {250, 500}", [(20, 20, 100, 90), (50, 50)]),
        ('{"bbox_2d": [100.0, 200.0, 500.0, 900.0]', [(20, 20, 100, 90)]),
        ("(1,2,3) [] [1] [a, b] [1, 2, 3, 4, 5] [99999999999, 1]", []),
        ("[" * 5000 + "1, " * 5000, []),
    ],
)
def test_boxes_are_read_from_answers_of_other_forms(answer: str, numbers: list[tuple[float, ...]]) -> None:
    read = PROCESSORS["glm4v"].processor.read_boxes(answer, SIZE)
    assert [pytest.approx(region.numbers) for region in read] == numbers


def test_the_name_of_an_object_is_read_with_its_box() -> None:
    text = '[{"bbox_2d": [1, 2, 3, 4], "label": "a dog"}, {"bbox_2d": [5, 6, 7, 8]}]'
    read = PROCESSORS["qwen3_vl"].processor.read_boxes(text, MediaSize(1000, 1000))
    assert read == [Region((1, 2, 3, 4), "a dog"), Region((5, 6, 7, 8))]
    text = "<ref>a dog</ref><box>[[1, 2, 3, 4]]</box><box>[[5, 6, 7, 8]]</box>"
    read = PROCESSORS["internvl"].processor.read_boxes(text, MediaSize(1000, 1000))
    assert [region.label for region in read] == ["a dog", ""]
