"""What is particular to the Qwen3-VL processor: a table of positions, seconds of clips, tools in conversations."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
import transformers
from chats import (
    as_reference,
    clip,
    conversation,
    grids,
    patches,
    picture,
    talk,
    text,
)
from parity import numbers
from processor_families import PROCESSORS
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import probe, read_media
from tessera.models.qwen3_vl.processor import Qwen3VLProcessor
from tests.errors import raises

SIDE = 32  # pixels along each side of a token
# The instruct template of the published folders, written down again with the same tests and the same words.
PUBLISHED = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


CASE = PROCESSORS["qwen3_vl"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CASE.folder


@pytest.fixture(scope="module")
def processor() -> Qwen3VLProcessor:
    loaded: Qwen3VLProcessor = CASE.processor
    return loaded


@pytest.fixture(scope="module")
def exported() -> Path:
    return CASE.exported


def test_places_in_the_table_are_the_references(processor: Qwen3VLProcessor) -> None:
    images = [picture(61, 87), picture(500, 333, 1), picture(32, 96, 2)]
    sample = conversation("image", "image", "image")
    index, weights = get_vision_interpolation_indices_and_weights(
        grids(processor, sample, images), 9, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    ours = patches(processor.encode(sample, images))
    assert torch.equal(ours["patch_index"], index)
    assert torch.equal(ours["patch_weights"], weights)


@pytest.mark.parametrize("rate", [3.0, 29.97])
def test_seconds_are_written_as_in_the_reference(processor: Qwen3VLProcessor, rate: float) -> None:
    kinds = ("image", "video", "image", "video")
    media = [clip(5 + n) if kind == "video" else picture(61 + 30 * n, 87) for n, kind in enumerate(kinds)]
    sizes = [
        MediaSize(70, 90, 5 + n, total=31 + 100 * n, rate=rate) if kind == "video" else MediaSize(61 + 30 * n, 87)
        for n, kind in enumerate(kinds)
    ]
    sample = conversation(*kinds)
    ours = processor.encode(sample, media, sizes)
    assert ours.tokens.tolist() == CASE.tokens(sample, media, sizes, answer=False)
    assert processor.measure(sample, sizes)["tokens"] == len(ours.tokens)


def test_pictures_through_the_references_own_processor(processor: Qwen3VLProcessor) -> None:
    images, sample = [picture(61, 87), picture(120, 60, seed=1)], conversation("image", "image")
    question = as_reference(Sample("one", sample.messages[:-1]))
    words = CASE.reference.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    theirs = CASE.reference(text=[words], images=images, return_tensors="pt")
    ours = processor.prompt([sample], [images])
    assert torch.equal(ours["tokens"], theirs["input_ids"][0])
    assert torch.equal(numbers(processor, ours["pixels"]), theirs["pixel_values"])


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize(("width", "height"), [(64, 64), (640, 360), (20, 50), (1000, 300), (33, 31), (400, 12)])
def test_frames_of_a_clip_are_resized_by_the_references_formula(
    processor: Qwen3VLProcessor, frames: int, width: int, height: int
) -> None:
    """The bounds are those of all frames together. A single frame stands for a pair."""
    video = processor.video
    wanted = smart_resize(
        max(frames, 2), height, width, factor=SIDE, min_pixels=video.min_pixels, max_pixels=video.max_pixels
    )
    assert video.fit(height, width, frames) == wanted
    assert processor.target("video", MediaSize(width, height, frames)) == wanted[::-1]
    with raises("media.image-too-narrow"):
        video.fit(20_000, 50, frames)


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TALKS = [
    talk(("user", "Hi"), ("assistant", "Yes.")),
    talk(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes.")),
    talk(("user", "Look"), ("assistant", CALL), ("tool", "blue"), ("assistant", "It is blue.")),
    talk(("user", "Look"), ("assistant", CALL), ("tool", "blue"), ("tool", "\ngrey\n"), ("tool", ""), ("user", "And?")),
]


@pytest.mark.parametrize("sample", TALKS)
@pytest.mark.parametrize("answer", [True, False])
def test_conversations_are_written_as_published(
    processor: Qwen3VLProcessor, exported: Path, sample: Sample, answer: bool
) -> None:
    pieces = processor.template.render(sample.messages, answer=answer)
    ours = "".join(piece.text for piece in pieces)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(PUBLISHED)
    assert ours == template.render(messages=as_reference(sample), add_generation_prompt=answer)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    again = tokenizer.apply_chat_template(as_reference(sample), tokenize=False, add_generation_prompt=answer)
    assert ours == again
    plain = [{"role": m.role, "content": m.parts[0].value} for m in sample.messages]
    assert tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=answer) == ours
    trained = "".join(piece.text for piece in pieces if piece.trained)
    assert trained == "".join(m.parts[0].value + "<|im_end|>" for m in sample.messages if m.role == "assistant")


def test_a_published_folder_has_no_system_prompt_of_its_own(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED)
    assert CASE.load(tmp_path).template.system is None
    assert CASE.load(tmp_path, system="Be brief.").template.system == "Be brief."


def test_seconds_follow_the_frames_that_are_taken(processor: Qwen3VLProcessor, folder: Path, tmp_path: Path) -> None:
    """From the header of a file to the words before each pair of frames."""
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(60):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 4 * number, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    sample = Sample("one", (Message("user", (Part("video", "clip.mp4"),)), Message("assistant", (text("Yes."),))))
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert probe(sample.media()[0], tmp_path, Limits(), processor.sampling, processor.target) == sizes[0]
    assert sizes[0].frames == 12
    spelled = processor.spell(processor.encode(sample, media, sizes).tokens.tolist())
    told = [word.split(" seconds>")[0] for word in spelled.split("<")[1:] if " seconds>" in word]
    # Of frames 0, 5, 11, 16, 21, 27, 32, 38, 43, 48, 54 and 59, at ten a second.
    assert told == ["0.2", "1.4", "2.4", "3.5", "4.5", "5.7"]


def test_what_a_bare_folder_means_is_what_the_published_files_say(folder: Path) -> None:
    bare = CASE.load(folder)
    assert (bare.image.min_pixels, bare.image.max_pixels) == (65536, 16777216)
    assert (bare.video.min_pixels, bare.video.max_pixels) == (4096, 25165824)
    assert bare.image.mean == bare.image.std == bare.video.mean == bare.video.std == (0.5, 0.5, 0.5)
    assert (bare.sampling.fps, bare.sampling.min_frames, bare.sampling.max_frames) == (2.0, 4, 768)


def test_files_name_the_processors(exported: Path) -> None:
    assert json.loads((exported / "preprocessor_config.json").read_text())["processor_class"] == "Qwen3VLProcessor"
    clips = json.loads((exported / "video_preprocessor_config.json").read_text())
    assert clips["video_processor_type"] == "Qwen3VLVideoProcessor"
    assert clips["size"] == {"shortest_edge": 4 * SIDE**2, "longest_edge": 60 * SIDE**2}
