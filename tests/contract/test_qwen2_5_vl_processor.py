"""What is particular to the Qwen2.5-VL processor: windows, and positions in real time."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers
from chats import (
    VOCAB,
    as_published,
    as_reference,
    by_kind,
    clip,
    conversation,
    grids,
    patches,
    picture,
    text,
)
from PIL import Image
from processor_families import PROCESSORS
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.video_utils import VideoMetadata

from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import probe, read_media
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.processor import Qwen25VLProcessor

SIDE = 28  # pixels along each side of a token
# The template of the published folders, written down again.
PUBLISHED = (
    "{% set pictures = namespace(count=0) %}{% set clips = namespace(count=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set pictures.count = pictures.count + 1 %}{% if add_vision_id %}Picture {{ pictures.count }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' or 'video' in part %}"
    "{% set clips.count = clips.count + 1 %}{% if add_vision_id %}Video {{ clips.count }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CASE = PROCESSORS["qwen2_5_vl"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CASE.folder


@pytest.fixture(scope="module")
def processor() -> Qwen25VLProcessor:
    loaded: Qwen25VLProcessor = CASE.processor
    return loaded


@pytest.fixture(scope="module")
def exported() -> Path:
    return CASE.exported


def loaded(config: Qwen25VLConfig | None = None, **options: Any) -> Qwen25VLProcessor:
    return Qwen25VLProcessor.load(config or CASE.config, CASE.folder, **{**CASE.options, **options})


@pytest.mark.parametrize("sizes", [[(56, 56)], [(300, 40)], [(190, 130)], [(61, 87), (500, 333), (28, 84)]])
def test_windows_are_the_references(processor: Qwen25VLProcessor, sizes: list[tuple[int, int]]) -> None:
    """That patches lie window by window is tested with the pixels of all families."""
    images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    sample = conversation(*["image"] * len(images))
    ours = processor.encode(sample, images)
    windows = CASE.in_windows(grids(processor, sample, images), patches(ours)["pixels"])[1]
    assert list(ours.streams["vision"].windows) == windows


def test_clips_lie_window_by_window_frame_by_frame() -> None:
    """Against the same processor with one window that holds all: there patches lie as they are cut."""
    frames, sample = clip(6, 190, 130), conversation("video")
    ours = loaded().encode(sample, [frames])
    plain = loaded(CASE.configure(window_size=100 * SIDE)).encode(sample, [frames])
    assert list(plain.streams["vision"].windows) == list(plain.streams["vision"].lengths)
    pixels, windows = CASE.in_windows(
        grids(loaded(CASE.configure(window_size=100 * SIDE)), sample, [frames]), patches(plain)["pixels"]
    )
    assert torch.equal(patches(ours)["pixels"], pixels)
    assert list(ours.streams["vision"].windows) == windows
    assert list(ours.streams["vision"].lengths) == list(plain.streams["vision"].lengths)
    assert torch.equal(ours.tokens, plain.tokens)


def test_every_embedding_goes_to_its_own_place(processor: Qwen25VLProcessor) -> None:
    """The place of a token in its picture follows from its positions; the encoder's patches say where they lie."""
    media = [picture(190, 130), clip(4, 190, 130), picture(130, 300)]
    samples = [processor.encode(conversation("image", "video"), media[:2]), processor.encode(conversation(), [])]
    samples.append(processor.encode(conversation("image"), media[2:]))
    batch = processor.collate([samples], 512)
    slots = batch["media_slots"]
    assert (
        sorted(slots.tolist())
        == torch.isin(batch["tokens"], torch.tensor([VOCAB - 2, VOCAB - 1])).nonzero()[:, 0].tolist()
    )
    assert slots.tolist() != sorted(slots.tolist())
    blocks = batch["patch_positions"].reshape(-1, 4, 2)
    assert bool((blocks // 2 == blocks[:, :1] // 2).all())  # a token's patches are neighbours
    place = batch["positions"][1:, slots].T - blocks[:, 0] // 2
    bounds = (batch.segments["vision"].bounds // 4).tolist()
    for start, end in pairwise(bounds):
        assert len(place[start:end].unique()) == 1  # all tokens of a frame are off by where it begins
    assert batch.segments["vision.windows"].bounds[-1] == batch.segments["vision"].bounds[-1] == len(batch["pixels"])
    inner = set(batch.segments["vision.windows"].bounds.tolist())
    assert inner.issuperset(batch.segments["vision"].bounds.tolist())


def reference_positions(
    tokens: torch.Tensor, images: Any, videos: Any, seconds: Any, config: Qwen25VLConfig | None = None
) -> torch.Tensor:
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig(**(config or CASE.config).to_hf()))
    kinds = (tokens == VOCAB - 2).int() + 2 * (tokens == VOCAB - 1).int()
    positions, _ = model.get_rope_index(
        tokens[None], kinds[None], image_grid_thw=images, video_grid_thw=videos, second_per_grid_ts=seconds
    )
    return as_published(positions[:, 0], kinds)


@pytest.mark.parametrize("media", [("image",), ("image", "image"), ("video",), ("image", "video", "image", "video")])
@pytest.mark.parametrize(("rate", "total", "per_second"), [(30.0, 120, 2), (24.0, 431, 2), (9.7, 33, 25)])
def test_positions_are_the_references(media: tuple[str, ...], rate: float, total: int, per_second: int) -> None:
    """Positions along time follow seconds: so many for each, whatever part of the frames was taken."""
    if transformers.__version__ < "5.22":
        pytest.skip("older references round the seconds down")
    config = CASE.configure(tokens_per_second=per_second)
    processor = loaded(config)
    taken = processor.sampling.count(total, rate)
    frames, size = clip(taken, 190, 130), MediaSize(190, 130, taken, total=total, rate=rate)
    things = [frames if kind == "video" else picture(61 + 30 * n, 87, seed=n) for n, kind in enumerate(media)]
    sizes = [size if kind == "video" else MediaSize(*thing.size) for kind, thing in zip(media, things, strict=True)]
    ours = processor.encode(conversation(*media), things, sizes)
    images, videos = by_kind(grids(processor, conversation(*media), things, sizes), media)
    seconds = None
    if videos is not None:
        metadata = VideoMetadata(
            total_num_frames=total, fps=rate, frames_indices=processor.sampling.spread(taken, total)
        )
        seconds = torch.tensor(
            [2 / metadata.sampled_fps] * len(videos)
        )  # a float32 tensor, as its processor returns it
    assert torch.equal(ours.positions, reference_positions(ours.tokens, images, videos, seconds, config))


def test_frames_that_nobody_timed_are_taken_as_sampled() -> None:
    for fps, seconds in ((2.0, 1.0), (1.0, 2.0), (0.5, 4.0)):
        processor = loaded(fps=fps)
        ours = processor.encode(conversation("video"), [clip(8, 190, 130)])
        expected = reference_positions(
            ours.tokens, None, grids(processor, conversation("video"), [clip(8, 190, 130)]), torch.tensor([seconds])
        )
        assert torch.equal(ours.positions, expected)


@pytest.mark.parametrize(("most", "step"), [(8, 2), (4, 4), (2, 8)])
def test_clips_from_files_know_their_time(tmp_path: Path, most: int, step: int) -> None:
    """Four seconds: of eight frames, four or two, each temporal patch stands for one second, two or four."""
    frames = [Image.fromarray(frame) for frame in clip(8, 62, 48)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=500, loop=0)
    processor = loaded(max_frames=most, min_frames=2)
    said = (Message("user", (Part("video", "a.gif"), text("When?"))), Message("assistant", (text("Now."),)))
    sample = Sample("one", said)
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert sizes == [probe(sample.media()[0], tmp_path, Limits(), processor.sampling, processor.target)]
    assert sizes[0].fps == most / 4
    ours = processor.encode(sample, media, sizes)
    time = ours.positions[0][ours.tokens == VOCAB - 1]
    assert (time.unique() - time[0]).tolist() == [step * n for n in range(most // 2)]
    assert processor.measure(sample, sizes)["tokens"] == len(ours.tokens)


@pytest.mark.parametrize("answer", [False, True])
def test_conversations_are_written_as_published(processor: Qwen25VLProcessor, answer: bool) -> None:
    sample = conversation("image", "video")
    spans = processor.template.render(sample.messages, answer=answer)
    published = jinja2.Template(PUBLISHED).render(messages=as_reference(sample), add_generation_prompt=answer)
    assert "".join(span.text for span in spans) == published


def test_files_name_the_processor(processor: Qwen25VLProcessor, exported: Path) -> None:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert json.loads((exported / name).read_text())["processor_class"] == "Qwen2_5_VLProcessor"
    other = Qwen25VLProcessor.load(CASE.configure(window_size=4 * SIDE), exported)
    assert other.fingerprint != processor.fingerprint  # its samples cost something else
