"""Images and videos with captions: the forms they come in, how they are packed, and what is refused."""

from __future__ import annotations

import copy
import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.core.sample import MediaSize, Sample
from tessera.core.spec import Processor
from tessera.data.media.read import ChatProcessor, MediaProcessor
from tessera.data.media.video_frames import VideoSampling
from tessera.diffusion.captions import Captions, EncodedPaddingCaptions
from tessera.diffusion.edit_images import EditPipeline
from tessera.diffusion.family import GenerationFamily, GenerationSpec
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.samples import EncodedMedia
from tessera.diffusion.sd3.config import SD3Family
from tessera.models import FAMILIES
from tests.errors import raises
from tests.toys.generation_set import (
    CROSS,
    JOINT,
    pipeline_folder,
    processor_of,
    rows_of,
    write_image,
    write_jsonl,
    write_tokenizer,
    write_video,
)


class Editing(GenerationFamily):
    @property
    def edits(self) -> tuple[EditPipeline, ...]:
        return (EditPipeline("Editor", Captions()),)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return pipeline_folder(tmp_path / "pipeline")


def samples_of(rows: Any) -> list[Sample]:
    return [rows.index.read(number)[0] for number in range(len(rows.index))]


# ---------------------------------------------------------------------------------------------- forms of records


def request_of(sample: Sample) -> tuple[str, list[Any], str, Any]:
    user, assistant = sample.messages
    words = "".join(part.value for part in user.parts if part.kind == "text")
    (wanted,) = assistant.parts
    return words, [part.value for part in user.parts if part.kind == "image"], wanted.kind, wanted.value


def test_records_of_every_spelling(tmp_path: Path, pipeline: Path) -> None:
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "b.png")
    write_video(tmp_path / "c.mp4", 5)
    for number in range(5):
        write_image(tmp_path / "frames" / f"{number}.png")
    rows = [
        {"path": "c.mp4", "cap": "red square"},
        {"path": "a.png", "cap": ["", "blue square", "green"]},
        {"path": "frames", "cap": "a folder of frames"},
        {"image": "a.png", "caption": "red"},
        {"video": "c.mp4", "text": "green"},
        {
            "messages": [
                {"role": "user", "content": "up"},
                {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]},
            ]
        },
        {
            "conversations": [{"from": "human", "value": "left"}, {"from": "gpt", "value": "<image>"}],
            "images": ["b.png"],
        },
    ]
    samples = samples_of(rows_of(processor_of(pipeline), str(write_jsonl(tmp_path / "all.jsonl", rows))))
    assert [request_of(one) for one in samples] == [
        ("red square", [], "video", "c.mp4"),
        ("blue square", [], "image", "a.png"),
        ("a folder of frames", [], "video", "frames"),
        ("red", [], "image", "a.png"),
        ("green", [], "video", "c.mp4"),
        ("up", [], "image", "a.png"),
        ("left", [], "image", "b.png"),
    ]


def test_images_to_edit_come_from_a_key_or_from_the_turn_of_the_user(tmp_path: Path, pipeline: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        write_image(tmp_path / name)
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "red"},
    ]
    answer = {"role": "assistant", "content": [{"type": "image", "image": "c.png"}]}
    rows = [
        {"image": "c.png", "prompt": "red", "references": ["a.png", "b.png"]},
        {"messages": [{"role": "user", "content": content}, answer]},
    ]
    path = str(write_jsonl(tmp_path / "edit.jsonl", rows))
    packed = rows_of(processor_of(pipeline, JOINT), path, length=64)
    assert [request_of(one) for one in samples_of(packed)] == [("red", ["a.png", "b.png"], "image", "c.png")] * 2
    with raises("data.too-many-bad-samples"):
        rows_of(processor_of(pipeline), path)
    with raises("data.too-many-bad-samples"):
        rows_of(processor_of(pipeline, Editing(4, (1, 2, 2), joint=True, captions=(Captions(length=8),))), path)


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "parquet", "folder", "metadata", "tar"])
def test_files_of_every_form(tmp_path: Path, pipeline: Path, form: str) -> None:
    media = tmp_path / "set"
    write_video(media / "one.mp4", 5)
    write_image(media / "two.png")
    table = [{"path": "one.mp4", "cap": "red, square"}, {"path": "two.png", "cap": "blue"}]
    source = media / f"data.{form}"
    if form in ("csv", "tsv"):
        with source.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["path", "cap"], delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(table)
    elif form == "json":
        source.write_text(json.dumps(table))
    elif form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(table), source)
    elif form == "folder":
        source = media
        (media / "one.txt").write_text("red, square\n")
        (media / "two.txt").write_text("blue")
    elif form == "metadata":
        source = media
        write_jsonl(media / "metadata.jsonl", [{"file_name": row["path"], "text": row["cap"]} for row in table])
    else:
        with tarfile.open(source, "w") as archive:
            for row in table:
                archive.add(media / row["path"], row["path"])
                words = json.dumps({"caption": row["cap"]}).encode()
                info = tarfile.TarInfo(row["path"].rpartition(".")[0] + ".json")
                info.size = len(words)
                archive.addfile(info, io.BytesIO(words))
    rows = rows_of(processor_of(pipeline), str(source), length=32)
    requests = [request_of(sample) for sample in samples_of(rows)]
    assert [(words, kind) for words, _, kind, _ in requests] == [("red, square", "video"), ("blue", "image")]
    batch = rows.batch(range(len(rows)))
    assert batch.problems == ()
    assert sorted(batch.shapes["frames"])[-2:] == [(1, 32, 32), (5, 32, 32)]


# ---------------------------------------------------------------------------------------------- sizes


def test_headers_tell_what_decoding_gives(tmp_path: Path, pipeline: Path) -> None:
    write_video(tmp_path / "v.mp4", 11, size=(72, 40))
    write_image(tmp_path / "i.png", (100, 50))
    rows = [{"path": "v.mp4", "cap": "red"}, {"path": "i.png", "cap": "a blue square"}]
    path = str(write_jsonl(tmp_path / "s.jsonl", rows))
    processor = processor_of(pipeline, JOINT, max_pixels=2048, num_frames=9)
    packed = rows_of(processor, path, length=64, pack=False, shuffle=False)
    video, image = packed.batch([0]), packed.batch([1])
    # 72x40 within 2048 pixels is 60.7x33.7, in patches of 16: 48x32; 9 frames are 3 of latents.
    assert video.shapes == {"latents": ((3, 2, 3), (1, 1, 64 - 18 - 2)), "frames": ((9, 32, 48), (0, 0, 0))}
    assert image.shapes["frames"][0] == (1, 32, 64)  # 64 x 32 of 100 x 50
    assert video.counts["tokens"] == packed.index.measure("tokens", 0) == 18 + 2
    assert packed.index.measure("frames", 0) == 9
    assert video.counts["trained"] == 18


@pytest.mark.parametrize(("taken", "used"), [(1, 1), (4, 1), (5, 5), (9, 9), (12, 9)])
def test_frames_are_one_and_a_multiple_of_the_stride(taken: int, used: int) -> None:
    processor = GenerationProcessor.load(CROSS, None, vae_stride=(4, 8))
    assert processor.sampling.count(taken, 8.0) == used
    assert processor.grid(MediaSize(32, 32, used)) == ((used - 1) // 4 + 1, 2, 2)


def test_patches_over_time_are_whole() -> None:
    family = GenerationFamily(channels=4, patch=(2, 2, 2))
    processor = GenerationProcessor.load(family, None, vae_stride=(4, 8))
    assert processor.grid(MediaSize(32, 32, 9)) == (1, 2, 2)  # 3 frames of latents, of which 2 fill a patch
    assert processor.frames(9) == 5
    with raises("media.fewer-frames-than-patch"):
        processor.grid(MediaSize(32, 32, 1))


def test_sizes_that_are_no_whole_patches_are_refused() -> None:
    with raises("generation.size-not-whole-patches", "16x16") as caught:
        GenerationProcessor.load(CROSS, None, vae_stride=(4, 8), height=100, width=64)
    assert caught.value.fix == "set height=96 and width=64"
    with raises("recipe.wrong-value"):
        GenerationProcessor.load(CROSS, None, height=64)
    with raises("recipe.unknown-key", "num_frame"):
        GenerationProcessor.load(CROSS, None, num_frame=9)
    small = GenerationProcessor.load(CROSS, None, vae_stride=(4, 8))
    with raises("media.smaller-than-patch", "16x16"):
        small.fit(40, 9)
    with raises("generation.unknown-vae-stride"):
        GenerationProcessor.load(CROSS, None).fit(40, 40)


def test_media_are_cropped_around_the_middle(tmp_path: Path, pipeline: Path) -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:, 16:48] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    path = str(write_jsonl(tmp_path / "s.jsonl", [{"path": "wide.png", "cap": "red"}]))
    batch = rows_of(processor_of(pipeline, height=32, width=32), path, length=16).batch([0])
    assert batch.shapes["frames"][0] == (1, 32, 32)
    assert int(batch["frames"].min()) == 255
    larger = rows_of(processor_of(pipeline, height=64, width=64), path, length=16).batch([0])
    assert larger.shapes["frames"][0] == (1, 64, 64)
    assert int(larger["frames"][64 * 32 + 32].min()) == 255


# ---------------------------------------------------------------------------------------------- batches


def items(processor: GenerationProcessor) -> list[EncodedMedia]:
    encoded = []
    for number, (frames, words) in enumerate([(5, 3), (1, 2)]):
        grid = processor.grid(MediaSize(32, 32, frames))
        tensors = {
            "text_ids": torch.arange(words),
            "frames": torch.full((frames, 32, 32, 3), number + 1, dtype=torch.uint8),
        }
        text = words if processor.family.joint else 0
        count = int(np.prod(grid)) + text
        encoded.append(EncodedMedia(f"s{number}", count, grid, words, tensors, (), {"samples": 1, "tokens": count}))
    return encoded


def test_a_batch_of_latents_that_attend_to_text(pipeline: Path) -> None:
    processor = processor_of(pipeline)
    first, two = items(processor)
    batch = processor.collate([[first, two], [EncodedMedia("lost", 4), two]], 16)
    assert batch.segments["latents"].lengths == (8, 4, 4, 4, 4, 8)
    assert batch.segments["text"].lengths == batch.segments["text_ids"].lengths == (3, 2, 0, 0, 2, 0)
    assert batch["sample_index"].tolist() == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 8
    assert batch.shapes["latents"] == ((2, 2, 2), (1, 2, 2), (1, 1, 4), (1, 1, 4), (1, 2, 2), (1, 1, 8))
    assert batch.shapes["frames"] == ((5, 32, 32), (1, 32, 32), (0, 0, 0), (0, 0, 0), (1, 32, 32), (0, 0, 0))
    assert batch["trained"].tolist() == [*range(12), *range(20, 24)]
    assert batch["frames"].shape == (7 * 32 * 32, 3)
    assert batch["frames"][:, 0].unique_consecutive().tolist() == [1, 2]
    assert batch["positions"].shape == (3, 32)
    assert torch.equal(batch["positions"][:, :8], CROSS.positions(0, [(2, 2, 2)]))
    assert "latent_index" not in batch
    assert batch.counts == {"samples": 3, "tokens": 16}


def test_a_batch_of_text_and_latents_in_one_sequence(pipeline: Path) -> None:
    processor = processor_of(pipeline, JOINT)
    first, two = items(processor)
    batch = processor.collate([[first, two]], 20)
    assert batch.segments["latents"].lengths == (11, 6, 3)
    assert batch["text_index"].tolist() == [0, 1, 2, 11, 12]
    assert batch["latent_index"].tolist() == [*range(3, 11), *range(13, 20)]
    assert batch["trained"].tolist() == list(range(12))  # among latents, of which the last three are padding
    assert torch.equal(batch["positions"][:, :11], JOINT.positions(3, [(2, 2, 2)]))
    assert batch.segments["text"].lengths == (3, 2, 0)


def test_images_to_edit_are_latents_that_are_not_trained_on(tmp_path: Path, pipeline: Path) -> None:
    write_image(tmp_path / "to.png", (32, 32))
    write_image(tmp_path / "from.png", (32, 16))
    rows = [{"image": "to.png", "prompt": "red", "references": ["from.png"]}]
    packed = rows_of(processor_of(pipeline, JOINT), str(write_jsonl(tmp_path / "e.jsonl", rows)), length=9)
    batch = packed.batch([0])
    assert batch.segments["latents"].lengths == (2 + 4 + 2, 1)
    assert batch.shapes["references"] == ((1, 16, 32),)
    assert batch["reference_sample"].tolist() == [0]
    assert batch["trained"].tolist() == [0, 1, 2, 3]
    assert batch["reference_index"].tolist() == [4, 5]
    assert batch["references"].shape == (16 * 32, 3)
    assert torch.equal(batch["positions"][:, :8], JOINT.positions(2, [(1, 2, 2), (1, 1, 2)]))


def test_an_image_beyond_the_table_of_positions_is_left_out(tmp_path: Path, pipeline: Path) -> None:
    write_image(tmp_path / "small.png", (32, 32))
    write_image(tmp_path / "large.png", (64, 32))
    rows = [{"path": f"{name}.png", "cap": "red", "id": name} for name in ("small", "large")]
    family = SD3Family(channels=4, patch=(1, 2, 2), joint=True, table=3)
    packed = rows_of(processor_of(pipeline, family), str(write_jsonl(tmp_path / "s.jsonl", rows)))
    assert [(bad.id, bad.code) for bad in packed.bad_samples] == [("large", "generation.size-has-no-positions")]


def test_every_row_has_one_length_and_every_sample_is_in_one(tmp_path: Path, pipeline: Path) -> None:
    rows = []
    for number in range(12):
        write_image(tmp_path / f"{number}.png", (32 + 16 * (number % 3), 32))
        rows.append({"path": f"{number}.png", "cap": "red", "id": f"s{number}"})
    packed = rows_of(processor_of(pipeline), str(write_jsonl(tmp_path / "s.jsonl", rows)), length=24)
    batches = [packed.batch([row]) for row in range(len(packed))]
    assert {batch["positions"].shape for batch in batches} == {(3, 24)}
    assert sorted(id for batch in batches for id in batch.sample_ids) == sorted(row["id"] for row in rows)
    assert len(packed) == 3  # 72 latents: no token of padding
    assert all(batch.seeds and batch.rows for batch in batches)
    again = rows_of(processor_of(pipeline), str(tmp_path / "s.jsonl"), length=24).batch([1])
    assert torch.equal(again["frames"], batches[1]["frames"])


# ---------------------------------------------------------------------------------------------- captions


def test_captions_are_cut_or_left_out(tmp_path: Path, pipeline: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_image(tmp_path / "a.png")
    rows = [{"path": "a.png", "cap": "red " * 20, "id": "long"}, {"path": "a.png", "cap": "red", "id": "short"}]
    path = str(write_jsonl(tmp_path / "s.jsonl", rows))
    with caplog.at_level("WARNING"):
        packed = rows_of(processor_of(pipeline), path, length=16, shuffle=False)
    assert "1 of 2 captions have more tokens than the model reads" in caplog.text
    batch = packed.batch([0])
    assert sorted(batch.segments["text_ids"].lengths) == [0, 2, 8]
    assert batch["text_ids"].tolist().count(1) == 2  # the end that the tokenizer writes is kept
    packed = rows_of(processor_of(pipeline, long_captions="leave_out"), path, length=16)
    assert [(bad.id, bad.code) for bad in packed.bad_samples] == [("long", "generation.caption-over-tokens")]


def test_several_text_encoders(tmp_path: Path) -> None:
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        write_tokenizer(tmp_path / name)
    family = GenerationFamily(
        channels=4,
        patch=(1, 2, 2),
        joint=True,
        captions=(
            Captions(tokenizer="tokenizer", length=4, tokens=False, pooled=True),
            EncodedPaddingCaptions(tokenizer="tokenizer_2", length=6, template="a {} up", skip=1),
            Captions(tokenizer="tokenizer_3", length=5, beside=True),
        ),
    )
    processor = GenerationProcessor.load(family, tmp_path, vae_stride=(4, 8))
    ids, cut = processor.tokenize("red blue green left down")
    assert [len(some) for some in ids] == [4, 7, 5]
    assert cut  # by the one that reads most
    assert processor._text(ids) == 6


@pytest.mark.slow
def test_a_tokenizer_of_the_older_class_is_converted(tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nr e\nre d</w>\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
    family = GenerationFamily(channels=4, patch=(1, 2, 2), captions=(Captions(length=77),))
    ids, _ = GenerationProcessor.load(family, tmp_path).tokenize("Red  box")
    assert ids[0] == CLIPTokenizer.from_pretrained(folder)("Red  box").input_ids
    assert ids[0][1] == words.index("red</w>")


# ---------------------------------------------------------------------------------------------- bad input


def test_bad_samples_are_named_with_the_reason(tmp_path: Path, pipeline: Path) -> None:
    write_image(tmp_path / "good.png")
    write_image(tmp_path / "large.png", (128, 128))
    write_image(tmp_path / "thin.png", (64, 4))
    write_video(tmp_path / "good.mp4", 9)
    write_video(tmp_path / "short.mp4", 3)
    whole = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "head.mp4").write_bytes(whole[:100])
    (tmp_path / "sound.wav").write_bytes(b"RIFF")
    cases = {
        "empty caption": ({"path": "good.png", "cap": "  "}, "data.empty-caption"),
        "no caption": ({"path": "good.png"}, "data.no-caption"),
        "number": ({"path": "good.png", "cap": 3}, "data.not-a-text"),
        "huge caption": ({"path": "good.png", "cap": "red " * 50_000}, "generation.caption-too-long"),
        "control word": ({"path": "good.png", "cap": "red </s> blue"}, "generation.control-word-in-caption"),
        "no media": ({"cap": "red"}, "data.no-media"),
        "two": ({"images": ["good.png", "good.png"], "cap": "red"}, "data.not-a-caption"),
        "missing": ({"path": "gone.mp4", "cap": "red"}, "media.no-such-file"),
        "audio": ({"path": "sound.wav", "cap": "red"}, "data.bad-media-value"),
        "zero": ({"path": "empty.mp4", "cap": "red"}, "media.unreadable-file"),
        "cut": ({"path": "head.mp4", "cap": "red"}, "media.unreadable-file"),
        "short": ({"path": "short.mp4", "cap": "red"}, "media.too-few-frames"),
        "large": ({"path": "large.png", "cap": "red"}, "data.sample-too-long"),
        "thin": ({"path": "thin.png", "cap": "red"}, "media.smaller-than-patch"),
        "surrogate": ({"path": "\ud800.png", "cap": "red"}, "media.not-a-path"),
        "outside": ({"path": "../good.png", "cap": "red"}, "media.path-leads-up"),
        "turns": ({"messages": [{"role": "user", "content": "red"}]}, "data.not-a-caption"),
        "words": (
            {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "no"}]},
            "data.not-a-caption",
        ),
    }
    rows = [{**row, "id": name} for name, (row, _) in cases.items()]
    rows += [{"path": "good.png", "cap": "red", "id": "fine"}, {"path": "good.mp4", "cap": "red", "id": "moving"}]
    path = str(write_jsonl(tmp_path / "s.jsonl", rows))
    packed = rows_of(processor_of(pipeline, min_frames=5), path, length=16, max_bad_share=1)
    assert {bad.id: bad.code for bad in packed.bad_samples} == {name: code for name, (_, code) in cases.items()}
    assert len(packed.index) == 2
    with raises("data.bad-sample"):
        rows_of(processor_of(pipeline), path, length=16, on_bad_sample="fail")


def test_a_video_that_ends_early_is_masked_and_named(tmp_path: Path, pipeline: Path) -> None:
    """Its header says that it is whole: only decoding tells."""
    write_video(tmp_path / "good.mp4", 9)
    write_video(tmp_path / "torn.mkv", 30)
    data = (tmp_path / "torn.mkv").read_bytes()
    (tmp_path / "torn.mkv").write_bytes(data[: len(data) // 2])
    rows = [{"path": name, "cap": "red", "id": name} for name in ("good.mp4", "torn.mkv")]
    packed = rows_of(processor_of(pipeline, num_frames=29), str(write_jsonl(tmp_path / "s.jsonl", rows)), length=64)
    batch = packed.batch([0])
    bad = [*batch.problems, *packed.bad_samples]
    assert [(sample.id, sample.code) for sample in bad] == [("torn.mkv", "media.damaged-file")]
    assert len(batch["trained"]) == 12  # of the other one
    assert batch["frames"].shape == (9 * 32 * 32, 3)


def test_a_turned_video_is_upright(tmp_path: Path, pipeline: Path) -> None:
    write_video(tmp_path / "v.mp4", 5, size=(64, 32), turned=1)
    path = str(write_jsonl(tmp_path / "s.jsonl", [{"path": "v.mp4", "cap": "red"}]))
    batch = rows_of(processor_of(pipeline), path, length=16).batch([0])
    assert batch.shapes["frames"][0] == (5, 64, 32)


def test_frames_are_taken_by_the_time_they_are_shown(tmp_path: Path, pipeline: Path) -> None:
    """Eight frames in the first second, and one for the next: two of the five ticks show the ninth."""
    times = [0, 1, 2, 3, 4, 5, 6, 7, 8, 16]
    write_video(tmp_path / "v.mp4", 10, times=times)
    path = str(write_jsonl(tmp_path / "s.jsonl", [{"path": "v.mp4", "cap": "red"}]))
    batch = rows_of(processor_of(pipeline, fps=2.0, num_frames=5), path, length=64).batch([0])
    shades = batch["frames"].reshape(5, -1).float().mean(1) / 10
    assert batch.shapes["frames"][0] == (5, 32, 32)
    assert (shades - torch.tensor([0, 4, 8, 8, 9])).abs().max() < 0.5


def test_ticks_of_a_steady_video() -> None:
    sampling = VideoSampling(fps=8.0, min_frames=1, max_frames=81, multiple=4, rule="pace")
    assert sampling.choose(25, 24.0) == [0, 3, 6, 9, 12, 15, 18, 21, 24]
    assert sampling.choose(24, 24.0) == [0, 3, 6, 9, 12]  # eight ticks: five are 1 + 4
    assert sampling.choose(10, None) == list(range(9))
    assert sampling.choose(3, 24.0) == [0]
    assert sampling.choose_by_time([i / 24 for i in range(25)], 9) == sampling.choose(25, 24.0)
    every = VideoSampling(fps=0.0, min_frames=1, max_frames=9, multiple=4, rule="pace")
    assert every.choose(100, 24.0) == list(range(9))
    assert VideoSampling().choose_by_time([0.0], 1) is None


# ---------------------------------------------------------------------------------------------- the processor


def test_the_processor_is_what_rows_need_and_no_chat_processor(pipeline: Path, tmp_path: Path) -> None:
    processor = processor_of(pipeline)
    assert isinstance(processor, Processor)
    assert isinstance(processor, MediaProcessor)
    assert not isinstance(processor, ChatProcessor)
    again = copy.deepcopy(processor)  # as it is sent to workers
    assert again.fingerprint == processor.fingerprint
    assert processor_of(pipeline, num_frames=5).fingerprint != processor.fingerprint
    processor.save(tmp_path / "kept")
    assert processor_of(tmp_path / "kept").fingerprint == processor.fingerprint
    with raises("generation.missing-tokenizer"):
        GenerationProcessor.load(CROSS, None).tokenize("red")
    write_image(tmp_path / "a.png")
    with raises("generation.missing-tokenizer", "model.tokenizer"):  # not one bad sample after another
        rows_of(
            GenerationProcessor.load(CROSS, None),
            str(write_jsonl(tmp_path / "s.jsonl", [{"path": "a.png", "cap": "red"}])),
        )


def test_a_family_of_images_leaves_videos_out(tmp_path: Path, pipeline: Path) -> None:
    vae = {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [8, 8, 8, 8]}
    (pipeline / "vae" / "config.json").write_text(json.dumps(vae))
    write_image(tmp_path / "a.png")
    write_video(tmp_path / "v.mp4", 5)
    rows = [{"path": name, "cap": "red", "id": name} for name in ("a.png", "v.mp4")]
    packed = rows_of(processor_of(pipeline, JOINT), str(write_jsonl(tmp_path / "s.jsonl", rows)), length=32)
    assert [(bad.id, bad.code) for bad in packed.bad_samples] == [("v.mp4", "media.video-for-image-model")]


def test_every_generation_family_has_this_processor() -> None:
    families = 0
    for name in FAMILIES.names():
        spec = FAMILIES.get(name)
        if isinstance(spec, GenerationSpec):
            assert spec.processor is not None
            processor = spec.processor(spec.config(**spec.presets["quickstart"]), None, vae_stride=(4, 8))
            assert isinstance(processor, GenerationProcessor)
            assert processor.grid(MediaSize(64, 64, 9))[0] >= 1
            families += 1
    assert families >= 8


def test_keys_of_conversations_are_refused(tmp_path: Path, pipeline: Path) -> None:
    write_image(tmp_path / "a.png")
    path = str(write_jsonl(tmp_path / "s.jsonl", [{"path": "a.png", "cap": "red"}]))
    with raises("data.key-of-conversations"):
        rows_of(processor_of(pipeline), path, truncate="turns")
    with raises("data.kind-needs-generation-model"):
        rows_of(None, path)  # type: ignore[arg-type]
