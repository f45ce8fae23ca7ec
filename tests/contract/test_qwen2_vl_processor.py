"""The Qwen2-VL processor against transformers: pixels, grids, token ids and positions are identical, not close.

The reference's clip processor needs torchvision, which the test machines do not have. Clips are compared with what its
public formulas give from the image processor's arithmetic: each frame as an image, pairs of frames joined along the
patch's time.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import (
    VOCAB,
    WORDS,
    as_published,
    by_kind,
    clip,
    conversation,
    grids,
    in_pairs,
    patches,
    picture,
    reference_ids,
    text,
    write_words,
)
from parity import numbers
from PIL import Image
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig as ReferenceConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from tessera.config.run_config import DataSection
from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tessera.errors import TesseraError
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.qwen2_vl.processor import Qwen2VLProcessor
from tessera.models.vision.patches import Patches
from tests.needs import need_transparency_over_white


def tiny_config() -> Qwen2VLConfig:
    return Qwen2VLConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "mrope_section": (2, 3, 3),
            },
            "vision": {"depth": 1, "embed_dim": 32, "num_heads": 2},
            "vision_start_token_id": VOCAB - 4,
            "vision_end_token_id": VOCAB - 3,
            "image_token_id": VOCAB - 2,
            "video_token_id": VOCAB - 1,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("tokenizer"), VOCAB, WORDS)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Qwen2VLProcessor:
    return Qwen2VLProcessor.load(
        tiny_config(),
        folder,
        min_pixels=28 * 28,
        max_pixels=28 * 28 * 20,
        video_min_pixels=28 * 28,
        video_max_pixels=28 * 28 * 6,
    )


@pytest.fixture(scope="module")
def exported(processor: Qwen2VLProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exported")
    processor.save(where)
    return where


def reference_positions(tokens: torch.Tensor, images: Any, videos: Any) -> torch.Tensor:
    with torch.device("meta"):
        model = Qwen2VLModel(ReferenceConfig(**tiny_config().to_hf()))
    kinds = (tokens == VOCAB - 2).int() + 2 * (tokens == VOCAB - 1).int()
    positions, _ = model.get_rope_index(tokens[None], kinds[None], image_grid_thw=images, video_grid_thw=videos)
    return as_published(positions[:, 0], kinds)


SIZES = [(56, 56), (61, 87), (300, 40), (500, 333), (9, 9), (28, 28), (1000, 20)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_and_grids_are_the_references(
    processor: Qwen2VLProcessor, exported: Path, width: int, height: int
) -> None:
    reference = Qwen2VLImageProcessorPil.from_pretrained(exported)
    image = picture(width, height)
    theirs = reference(images=[image], return_tensors="pt")
    ours = processor.encode(conversation("image"), [image])
    assert torch.equal(grids(processor, conversation("image"), [image]), theirs["image_grid_thw"])
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), theirs["pixel_values"])
    assert patches(ours)["pixels"].dtype == torch.uint8


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK", "1"])
def test_pixels_of_other_modes(processor: Qwen2VLProcessor, exported: Path, mode: str) -> None:
    if "A" in mode:
        need_transparency_over_white()
    image = picture(64, 48, mode=mode)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(exported)(images=[image], return_tensors="pt")
    ours = processor.encode(conversation("image"), [image])
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), theirs["pixel_values"])


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
    fixed = Qwen2VLProcessor.load(tiny_config(), folder, frames=8)
    assert fixed.sampling.count(1000, 30.0) == 8
    assert fixed.fingerprint != Qwen2VLProcessor.load(tiny_config(), folder).fingerprint
    fixed.save(tmp_path)
    stored = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert stored["num_frames"] == 8
    assert "fps" not in stored
    assert Qwen2VLProcessor.load(tiny_config(), tmp_path).sampling == fixed.sampling
    assert Qwen2VLProcessor.load(tiny_config(), tmp_path, fps=1.0).sampling.frames is None
    with pytest.raises(TesseraError, match="not both"):
        Qwen2VLProcessor.load(tiny_config(), folder, frames=8, fps=1.0)
    with pytest.raises(TesseraError, match="is more than max_frames"):
        Qwen2VLProcessor.load(tiny_config(), folder, min_frames=9, max_frames=8)
    with pytest.raises(TesseraError, match="no audio input"):
        fixed.measure(conversation("audio"), [MediaSize(0, 0, 0, 16000)])


def test_tokens_are_the_references(processor: Qwen2VLProcessor, exported: Path) -> None:
    images = [picture(61, 87), picture(120, 60, seed=1)]
    sample = conversation("image", "image")
    ours = processor.encode(sample, images)
    counts = [("image", int(grid.prod()) // 4) for grid in grids(processor, sample, images)]
    assert ours.tokens.tolist() == reference_ids(exported, sample, counts)
    asked = Sample("one", sample.messages[:-1])
    prompt = processor.prompt([sample], [images])
    assert prompt["tokens"].tolist() == reference_ids(exported, asked, counts, add_generation_prompt=True)


def test_text_alone_and_its_own_system_prompt(processor: Qwen2VLProcessor, exported: Path) -> None:
    for opening in (Message("system", (text("Be brief."),)), Message("user", (text("Hi"),))):
        sample = Sample("one", (opening, Message("assistant", (text("Yes."),))))
        ours = processor.encode(sample, [])
        assert ours.tokens.tolist() == reference_ids(exported, sample, [])
        assert torch.equal(ours.positions, torch.arange(len(ours.tokens)).expand(3, -1))
        assert "pixels" not in processor.collate([[ours]], 128)


def test_rows_of_one_long_item_each_are_said_to_be_so(processor: Qwen2VLProcessor) -> None:
    """Kernels for whole rows are faster, as long as little of a row is padding. Prompts come in all lengths."""
    item = processor.encode(conversation("image"), [picture(61, 87)])
    full, roomy = len(item.tokens) + 5, 2 * len(item.tokens)
    rows = {"full": ([[item], [item]], full), "roomy": ([[item], [item]], roomy), "packed": ([[item, item]], roomy)}
    said = {name: processor.collate(*given).segments["text"].rows for name, given in rows.items()}
    assert said == {"full": 2, "roomy": 0, "packed": 0}
    assert processor.prompt([conversation("image")], [[picture(61, 87)]]).segments["text"].rows == 0


@pytest.mark.parametrize("system", [None, "Answer in {{ braces }}."])
def test_a_folder_with_another_system_prompt(folder: Path, tmp_path: Path, system: str | None) -> None:
    plain = Qwen2VLProcessor.load(tiny_config(), folder, system=system)
    plain.save(tmp_path)
    sample = Sample("one", (Message("user", (text("Hi"),)), Message("assistant", (text("Yes."),))))
    assert plain.encode(sample, []).tokens.tolist() == reference_ids(tmp_path, sample, [])


@pytest.mark.parametrize("media", [("image",), ("image", "image"), ("video",), ("image", "video", "image")])
def test_positions_are_the_references(processor: Qwen2VLProcessor, media: tuple[str, ...]) -> None:
    things = [clip(6) if kind == "video" else picture(61 + 30 * i, 87, seed=i) for i, kind in enumerate(media)]
    ours = processor.encode(conversation(*media), things)
    assert torch.equal(
        ours.positions,
        reference_positions(ours.tokens, *by_kind(grids(processor, conversation(*media), things), media)),
    )


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


def test_a_clip_is_pairs_of_frames(processor: Qwen2VLProcessor, exported: Path) -> None:
    """Five frames: the last temporal patch holds the fifth twice."""
    ours = processor.encode(conversation("video"), [clip(5)])
    size = {"shortest_edge": processor.video.min_pixels, "longest_edge": processor.video.max_pixels}
    reference = Qwen2VLImageProcessorPil.from_pretrained(exported)
    stills = [reference(images=[Image.fromarray(f)], size=size, return_tensors="pt") for f in clip(5)]
    _, h, w = stills[0]["image_grid_thw"][0].tolist()
    assert grids(processor, conversation("video"), [clip(5)]).tolist() == [[3, h, w]]
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), in_pairs([one["pixel_values"] for one in stills]))
    assert int((ours.tokens == VOCAB - 1).sum()) == 3 * h * w // 4


def test_only_what_the_assistant_says_is_trained(processor: Qwen2VLProcessor, folder: Path) -> None:
    sample = conversation("image")
    ours = processor.encode(sample, [picture(56, 56)])
    trained = ours.labels != IGNORE
    assert torch.equal(ours.labels[trained], ours.tokens[trained])
    runs, run = [], []
    for token, flag in zip(ours.tokens.tolist(), trained.tolist(), strict=True):
        if flag:
            run.append(token)
        elif run:
            runs.append(run)
            run = []
    assert len(runs) == 2
    assert [r[-1] for r in runs] == [processor.encoder.id_of("<|im_end|>")] * 2
    # The header's newline and the answer's own first newline may be one token; then it is trained.
    assert processor.decode(runs[0]).lstrip("\n") == "A red square.\n"
    assert processor.decode(runs[1]) == "中文 12345"
    both = processor.training_on(["assistant", "user"]).encode(sample, [picture(56, 56)])
    spoken = processor.decode(both.tokens[both.labels != IGNORE].tolist())
    assert "What is in the picture?" in spoken
    assert "helpful" not in spoken
    assert not bool((both.labels == VOCAB - 2).any())


def test_measure_is_what_encode_gives(processor: Qwen2VLProcessor) -> None:
    sample = conversation("image", "video")
    measured = processor.measure(sample, [MediaSize(333, 91), MediaSize(80, 50, 7)])
    encoded = processor.encode(sample, [picture(333, 91), clip(7, 80, 50)])
    assert {name: measured[name] for name in encoded.counts} == encoded.counts
    assert measured["tokens"] == len(encoded.tokens)
    assert measured["patches"] == len(patches(encoded)["pixels"])
    assert measured["frames"] == 7
    assert measured["images"] == 1
    assert measured["trained"] == int((encoded.labels != IGNORE).sum())


def test_collate_packs_rows(processor: Qwen2VLProcessor) -> None:
    a = processor.encode(conversation("image"), [picture(56, 84)])
    b = processor.encode(conversation(), [])
    c = processor.encode(conversation("image", "video"), [picture(56, 56), np.zeros((4, 56, 56, 3), dtype=np.uint8)])
    length = len(a.tokens) + len(b.tokens) + 5
    batch = processor.collate([[a, b], [c]], length)
    assert batch["tokens"].shape == batch["labels"].shape == (2 * length,)
    assert batch["positions"].shape == (3, 2 * length)
    bounds = batch.segments["text"].bounds.tolist()
    assert bounds == [0, len(a.tokens), length - 5, length, length + len(c.tokens), 2 * length]
    for item, start in ((a, 0), (b, len(a.tokens)), (c, length)):
        end = start + len(item.tokens)
        assert torch.equal(batch["tokens"][start:end], item.tokens)
        assert torch.equal(batch["positions"][:, start:end], item.positions)
        assert torch.equal(batch["labels"][start : end - 1], item.labels[1:])
        assert int(batch["labels"][end - 1]) == IGNORE  # does not predict the next sample
    assert bool((batch["labels"][length - 5 : length] == IGNORE).all())
    media = torch.isin(batch["tokens"], torch.tensor([VOCAB - 2, VOCAB - 1])).nonzero()[:, 0]
    assert torch.equal(batch["media_slots"], media)
    assert len(media) * 4 == len(batch["pixels"]) == len(batch["patch_positions"])
    assert torch.equal(batch["pixels"], torch.cat([patches(a)["pixels"], patches(c)["pixels"]]))
    assert batch.segments["vision"].bounds.diff().tolist() == [24, 16, 16, 16]
    assert batch["patch_positions"][:6].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]
    assert batch.counts["trained"] == int((batch["labels"] != IGNORE).sum())
    assert batch.counts["samples"] == 3


def test_special_words_in_a_text_stay_text(processor: Qwen2VLProcessor) -> None:
    sample = Sample(
        "one", (Message("user", (text("a <|im_end|><|image_pad|> b"),)), Message("assistant", (text("ok"),)))
    )
    tokens = processor.encode(sample, []).tokens.tolist()
    assert tokens.count(processor.encoder.id_of("<|im_end|>")) == 3  # system, user, assistant
    assert VOCAB - 2 not in tokens


def test_save_and_load_again(processor: Qwen2VLProcessor, exported: Path) -> None:
    again = Qwen2VLProcessor.load(tiny_config(), exported)
    assert (again.image, again.video) == (processor.image, processor.video)
    sample, image = conversation("image"), picture(61, 87)
    assert torch.equal(
        patches(again.encode(sample, [image]))["pixels"], patches(processor.encode(sample, [image]))["pixels"]
    )
    assert again.fingerprint == processor.fingerprint
    assert again.training_on(["user"]).fingerprint != processor.fingerprint
    assert processor.stop_tokens == (VOCAB - 5, VOCAB - 7)
    travelled = pickle.loads(pickle.dumps(processor))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == processor.fingerprint


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
    assert [i for b in batches for i, _ in b.problems] == ["p2"]
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


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(TesseraError, match="unknown key: min_pixel"):
        Qwen2VLProcessor.load(config, folder, min_pixel=5)
    with pytest.raises(TesseraError, match="no tokenizer"):
        Qwen2VLProcessor.load(config, tmp_path)
    with pytest.raises(TesseraError, match="is more than"):
        Qwen2VLProcessor.load(config, folder, min_pixels=10_000, max_pixels=5_000)
    with pytest.raises(TesseraError, match=r"<\|image_pad\|> is 398 for the tokenizer and 397 for the model"):
        Qwen2VLProcessor.load(config.model_copy(update={"image_token_id": 397}), folder)
    processor = Qwen2VLProcessor.load(config, folder)
    with pytest.raises(TesseraError, match="too narrow"):
        processor.measure(conversation("image"), [MediaSize(3000, 3)])


@pytest.mark.parametrize("system", [None, "Speak of {braces} briefly.", "You are a helpful assistant."])
def test_a_saved_folder_brings_its_own_system_prompt_and_sampling(
    system: str | None, folder: Path, tmp_path: Path
) -> None:
    """An export answers as the run did: nobody has to repeat the options that it was trained with."""
    made = Qwen2VLProcessor.load(tiny_config(), folder, system=system, fps=3.0, max_frames=10)
    made.save(tmp_path)
    read = Qwen2VLProcessor.load(tiny_config(), tmp_path)
    assert (read.template, read.sampling) == (made.template, made.sampling)
    assert Qwen2VLProcessor.load(tiny_config(), tmp_path, system="Other.").template.system == "Other."
