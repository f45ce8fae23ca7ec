"""What is particular to the Qwen2-VL processor, or shared by all and tested once: files, drafts, rows, a loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import (
    VOCAB,
    clip,
    conversation,
    grids,
    patches,
    picture,
    text,
)
from parity import numbers
from PIL import Image
from processor_families import PROCESSORS
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tessera.config.run_config import DataSection
from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tessera.models.qwen2_vl.processor import Qwen2VLProcessor
from tessera.models.vision.patches import Patches
from tests.errors import raises

CASE = PROCESSORS["qwen2_vl"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CASE.folder


@pytest.fixture(scope="module")
def processor() -> Qwen2VLProcessor:
    loaded: Qwen2VLProcessor = CASE.processor
    return loaded


@pytest.fixture(scope="module")
def exported() -> Path:
    return CASE.exported


@pytest.mark.parametrize(("width", "height"), [(500, 333), (900, 1300), (40, 30)])
def test_pixels_of_files_are_the_references(
    processor: Qwen2VLProcessor, exported: Path, tmp_path: Path, width: int, height: int
) -> None:
    """Read as training reads them: made smaller while decoded, and still the same bits. Drafts are close."""
    assert DataSection().jpeg_draft is False
    smooth = picture(16, 12).resize((width, height), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    sample = Sample("one", (Message("user", (Part("image", "a.jpg"),)), Message("assistant", (text("Yes."),))))
    with Image.open(tmp_path / "a.jpg") as image:
        theirs = Qwen2VLImageProcessorPil.from_pretrained(exported)(images=[image], return_tensors="pt")
    for draft, limits in ((False, Limits()), (True, Limits(jpeg_draft=True))):
        media, sizes = read_media(sample, tmp_path, limits, processor)
        assert sizes == [MediaSize(width, height)]
        assert media[0].width * media[0].height <= min(width * height, processor.image.max_pixels)
        ours = processor.encode(sample, media, sizes)
        assert torch.equal(grids(processor, sample, media, sizes), theirs["image_grid_thw"])
        assert processor.measure(sample, sizes)["tokens"] == len(ours.tokens)
        if draft:
            apart = numbers(processor, patches(ours)["pixels"]) - theirs["pixel_values"]
            assert float(apart.abs().mean()) < 0.1  # of values from -2 to 2
        else:
            assert torch.equal(numbers(processor, patches(ours)["pixels"]), theirs["pixel_values"])
        prompt = processor.prompt([sample], [media], [sizes])
        assert torch.equal(prompt["pixels"], patches(ours)["pixels"])


def test_frames_kept_small_are_the_same_frames(processor: Qwen2VLProcessor) -> None:
    """Sizes whose target is a fixed point of nothing: the grid follows the header, not what frames were brought to."""
    frames, sample, size = clip(5, 300, 40), conversation("video"), MediaSize(300, 40, 5)
    target = processor.target("video", size)
    small = np.stack([np.asarray(Image.fromarray(frame).resize(target, Image.Resampling.BICUBIC)) for frame in frames])
    whole = processor.encode(sample, [frames])
    again = processor.encode(sample, [small], [size])
    assert torch.equal(patches(whole)["pixels"], patches(again)["pixels"])
    assert torch.equal(whole.tokens, again.tokens)


@pytest.mark.parametrize("patch", [7, 14])
def test_patches_are_the_plain_formula(patch: int) -> None:
    """The tables against what they stand for, also where a patch has an odd number of pixels."""
    patches = Patches(1, 10**9, patch=patch)
    side = patch * 2
    for frames in (1, 3, 4):
        clip = np.random.default_rng(0).integers(0, 256, (frames, 2 * side, 3 * side, 3), dtype=np.uint8)
        grid = patches.grid(2 * side, 3 * side, frames)
        cut = patches.cut(clip, grid)
        assert np.array_equal(cut, patches.cut([Image.fromarray(frame) for frame in clip], grid))
        last = np.concatenate([clip, np.repeat(clip[-1:], grid[0] * 2 - frames, axis=0)])
        scaled = (last.astype(np.float64) / 255).astype(np.float32)
        values = (scaled - np.float32(patches.mean)) / np.float32(patches.std)
        blocks = values.reshape(grid[0], 2, 2, 2, patch, 3, 2, patch, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        assert np.allclose(patches.numbers(cut), blocks.reshape(cut.shape), atol=1e-6, rtol=0)


def test_a_fixed_number_of_frames(folder: Path, tmp_path: Path) -> None:
    fixed = CASE.load(folder, frames=8)
    assert fixed.sampling.count(1000, 30.0) == 8
    assert fixed.fingerprint != CASE.load(folder).fingerprint
    fixed.save(tmp_path)
    stored = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert stored["num_frames"] == 8
    assert "fps" not in stored
    assert CASE.load(tmp_path).sampling == fixed.sampling
    assert CASE.load(tmp_path, fps=1.0).sampling.frames is None


def test_rows_of_one_long_item_each_are_said_to_be_so(processor: Qwen2VLProcessor) -> None:
    """Kernels for whole rows are faster, as long as little of a row is padding. Prompts come in all lengths."""
    item = processor.encode(conversation("image"), [picture(61, 87)])
    full, roomy = len(item.tokens) + 5, 2 * len(item.tokens)
    rows = {"full": ([[item], [item]], full), "roomy": ([[item], [item]], roomy), "packed": ([[item, item]], roomy)}
    said = {name: processor.collate(*given).segments["text"].rows for name, given in rows.items()}
    assert said == {"full": 2, "roomy": 0, "packed": 0}
    assert processor.prompt([conversation("image")], [[picture(61, 87)]]).segments["text"].rows == 0


def test_text_behind_a_video_goes_on_past_its_last_moment(processor: Qwen2VLProcessor) -> None:
    """Ten steps along time of 2 x 3 tokens: the largest position is that of time, so text begins at ten, not at three.
    The numbers are written out: this is the rule that the published weights know, whatever a library does."""
    ours = processor.encode(conversation("video", "image"), [clip(20), picture(61, 87)])
    assert grids(processor, conversation("video", "image"), [clip(20), picture(61, 87)]).tolist()[0] == [10, 6, 4]
    video = (ours.tokens == VOCAB - 1).nonzero()[:, 0]
    first, last = int(video[0]), int(video[-1])
    assert ours.positions[:, last].tolist() == [first + 9, first + 2, first + 1]
    assert ours.positions[:, last + 1].tolist() == [first + 10] * 3
    image = (ours.tokens == VOCAB - 2).nonzero()[:, 0]
    assert ours.positions[:, int(image[-1]) + 1].tolist() == [int(ours.positions[:, image].max()) + 1] * 3


@pytest.mark.slow
def test_from_a_file_to_batches(processor: Qwen2VLProcessor, tmp_path: Path) -> None:
    """The whole road with this processor: index, packing, worker process, and a picture that fails when decoded."""
    rows = []
    for number in range(6):
        picture(40 + 20 * number, 60, seed=number).save(tmp_path / f"{number}.png")
        said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": f"It is {number}."}]
        rows.append({"id": f"p{number}", "conversations": said, "image": f"{number}.png"})
    rows.append({"id": "words", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]})
    (tmp_path / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    data = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(data[: len(data) // 2])
    section = DataSection.model_validate({"train": [{"path": tmp_path / "data.json"}], "length": 128})
    source = KINDS.get("chat")(RowRequest(section, "train", processor, 0, tmp_path / "cache"))
    with Loader(source, global_batch=len(source), workers=1) as loader:
        batches = next(loader)
    assert sorted(i for b in batches for i in b.sample_ids) == sorted(row["id"] for row in rows)
    assert [bad.id for b in batches for bad in b.problems] == ["p2"]
    assert sum(b.counts["samples"] for b in batches) == 6
    assert sum(b.counts["images"] for b in batches) == 5
    for batch in batches:
        bounds = batch.segments["text"].bounds.tolist()
        assert bounds[-1] == 128
        assert batch.counts["trained"] == int((batch["labels"] != IGNORE).sum())
        assert len(batch.get("media_slots") if "media_slots" in batch else ()) == int(
            (batch["tokens"] == VOCAB - 2).sum()
        )
        for id, start, end in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
            if id == "p2":
                assert bool((batch["labels"][start:end] == IGNORE).all())
                assert torch.equal(batch["positions"][:, start:end], torch.arange(end - start).expand(3, -1))


def test_patches_are_packed_block_by_block(processor: Qwen2VLProcessor) -> None:
    images = [picture(56, 84), picture(56, 56)]
    items = [processor.encode(conversation("image"), [image]) for image in images]
    batch = processor.collate([items], 256)
    assert batch.segments["vision"].lengths == (24, 16)
    assert batch["patch_positions"][:6].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]


def test_sizes_without_a_grid_are_refused(folder: Path) -> None:
    with raises("media.bounds-crossed"):
        CASE.load(folder, min_pixels=10_000, max_pixels=5_000)
    with raises("media.image-too-narrow"):
        CASE.load(folder).measure(conversation("image"), [MediaSize(3000, 3)])
