"""What is particular to the GLM-4.1V processor: sizes of clips, a table of positions, seconds, ends of turns."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from chats import as_reference, clip, grids, patches, picture, text
from chats import conversation as any_conversation
from processor_families import PROCESSORS
from processors import SIZES
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Sample
from tessera.models.glm4v.model import bicubic_positions
from tessera.models.glm4v.processor import Glm4vProcessor
from tests.errors import raises

SIDE = 28  # of the picture that one token is
# What the folder of GLM-4.1V-9B-Thinking holds.
PUBLISHED = """[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\\n' }}

        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' or 'video' in item %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' or 'image' in item %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
        {%- if msg.metadata %}
<|assistant|>{{ msg.metadata }}
{{ msg.content }}
        {%- else %}
<|assistant|>
{{ msg.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


CASE = PROCESSORS["glm4v"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CASE.folder


@pytest.fixture(scope="module")
def processor() -> Glm4vProcessor:
    loaded: Glm4vProcessor = CASE.processor
    return loaded


@pytest.fixture(scope="module")
def exported() -> Path:
    return CASE.exported


conversation = partial(any_conversation, answer="<think>\nLet me look.</think>\nA red square.\n")


@pytest.mark.parametrize("answer", [False, True])
def test_conversations_are_written_as_published(processor: Glm4vProcessor, answer: bool) -> None:
    """The published template takes what is no user's as one text. It does not end the last answer."""
    sample = conversation("image", "video")
    said = [
        {**turn, "content": turn["content"] if turn["role"] == "user" else turn["content"][0]["text"]}
        for turn in as_reference(sample)
    ]
    published = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(PUBLISHED)
    spans = [span.text for span in processor.template.render(sample.messages, answer=answer)]
    words = "".join(spans if answer else spans[:-1])
    assert words == published.render(messages=said, add_generation_prompt=answer)


@pytest.mark.parametrize(
    ("total", "rate", "frames"),
    [(90, 29.97, 6), (300, 12.5, 48), (7, 1.0, 7), (100, None, 4), (5, 30.0, 5), (1, 2.0, 1)],
)
def test_seconds_are_written_behind_frames(
    processor: Glm4vProcessor, total: int, rate: float | None, frames: int
) -> None:
    sizes = [MediaSize(61, 87), MediaSize(56, 56, frames, total=total, rate=rate)]
    sample, media = conversation("image", "video"), [picture(61, 87), clip(frames, 56, 56)]
    ours = processor.encode(sample, media, sizes)
    assert ours.tokens.tolist() == CASE.tokens(sample, media, sizes, answer=False)
    assert processor.measure(sample, sizes)["tokens"] == len(ours.tokens)


@pytest.mark.parametrize("frames", [2, 3, 5, 7, 8, 30])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_clips_have_the_size_of_the_references(processor: Glm4vProcessor, frames: int, width: int, height: int) -> None:
    video = processor.video
    theirs = smart_resize(frames, height, width, factor=SIDE, min_pixels=video.min_pixels, max_pixels=video.max_pixels)
    assert video.fit(height, width, frames) == theirs
    assert processor.target("video", MediaSize(width, height, frames)) == theirs[::-1]


def test_patches_read_the_table_where_they_lie(processor: Glm4vProcessor) -> None:
    ours = processor.encode(conversation("image", "video"), [picture(61, 87), clip(4)])
    parts = []
    for t, h, w in grids(processor, conversation("image", "video"), [picture(61, 87), clip(4)]).tolist():
        count = sum(len(one[0]) for one in parts)
        places = patches(ours)["patch_positions"][count : count + h * w].numpy()
        parts += [bicubic_positions(places, h, w, 6)] * t  # a table for pictures of 84 x 84
    assert torch.equal(patches(ours)["patch_index"], torch.from_numpy(np.concatenate([index for index, _ in parts])))
    assert torch.equal(patches(ours)["patch_weights"], torch.from_numpy(np.concatenate([w for _, w in parts])))


def test_what_is_trained(processor: Glm4vProcessor) -> None:
    """An answer, and the word with which the next turn begins: it is how a model of this family stops."""
    sample = conversation("image")
    ours = processor.encode(sample, [picture(56, 56)])
    trained = ours.labels != IGNORE
    assert torch.equal(ours.labels[trained], ours.tokens[trained])
    spoken = processor.spell(ours.tokens[trained].tolist())
    assert spoken.replace("\n<think>", "<think>") == (
        "<think>\nLet me look.</think>\nA red square.\n<|user|>中文 12345<|user|>"
    )
    last = processor.training_on(["assistant"], last_only=True).encode(sample, [picture(56, 56)])
    assert processor.spell(last.tokens[last.labels != IGNORE].tolist()) == "中文 12345<|user|>"
    called = Sample("two", (*sample.messages[:2], Message("tool", (text("red"),)), *sample.messages[3:]))
    ours = processor.encode(called, [picture(56, 56)])
    assert processor.spell(ours.tokens[ours.labels != IGNORE].tolist()).count("<|observation|>") == 1
    both = processor.training_on(["assistant", "user"]).encode(sample, [picture(56, 56)])
    assert not bool((both.labels == CASE.config.image_token_id).any())


def test_the_rate_wins_over_a_number_of_frames_that_the_reference_ignores(folder: Path, tmp_path: Path) -> None:
    CASE.load(folder).save(tmp_path)
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fps": 1.5, "num_frames": 16}))
    sampling = CASE.load(tmp_path).sampling
    assert (sampling.frames, sampling.fps) == (None, 1.5)
    assert CASE.load(folder, frames=8).sampling.frames == 8


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    with raises("media.image-too-narrow"):
        CASE.load(folder).measure(conversation("image"), [MediaSize(30000, 30)])
    CASE.load(folder).save(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "Glm46VProcessor"}))
    with raises("tokenizer.unknown-conversation", "Glm46VProcessor"):
        CASE.load(tmp_path)
