"""Training of Qwen-Image-Edit: its text encoder reads the images to edit, online and in features, as diffusers does."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import tessera
from tessera.core.task import FrozenModule
from tessera.data.order.packed_rows import PackedRows
from tessera.diffusion.autoencoders import VAE
from tessera.diffusion.encoders import Encoders, without_captions
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.qwen_image.config import QwenImageConfig
from tessera.tools.data_features import write_features
from tests.close import assert_as_close, assert_within_rounding, move_by_a_rounding
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.generation_set import rows_of, write_jsonl
from tests.toys.sampling_folders import write_qwen_image

CPU = torch.device("cpu")
FAMILY = QwenImageConfig(in_channels=16, out_channels=4).generation()
OPTIONS: dict[str, Any] = {"max_pixels": 1024, "reference_pixels": 64 * 64}
CAPTIONS = ("a red kite", "the blue dog moving left", "cat", "the kite")


def image(seed: int, size: tuple[int, int] = (60, 50)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write_set(folder: Path, references: int = 1) -> Path:
    """Write four edits, of images in several sizes."""
    rows: list[dict[str, Any]] = []
    for number, caption in enumerate(CAPTIONS):
        image(number, (32, 32)).save(folder / f"{number}.png")
        names = [f"{number}-{at}.png" for at in range(references)]
        for at, name in enumerate(names):
            image(10 + number + at, (60 + 20 * number, 50 + 30 * at)).save(folder / name)
        rows.append({"id": f"s{number}", "path": f"{number}.png", "cap": caption, "references": names})
    return write_jsonl(folder / "edits.jsonl", rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A pipeline with random weights in a folder, and the same in diffusers; and a set of edits."""
    folder = tmp_path_factory.mktemp("edit")
    write_set(folder)
    return folder, write_qwen_image(folder / "model", edit=True)


def encoders_of(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Encoders:
    parts = PipelineFolder(folder)
    modules = {VAE: parts.autoencoder(), "text_encoder": parts.text_encoder(FAMILY.captions[0], dtype=dtype)}
    frozen = {name: FrozenModule(module, CPU, "device") for name, module in modules.items()}
    return Encoders(FAMILY, frozen, parts, **options)


def processor_of(folder: Path) -> GenerationProcessor:
    return GenerationProcessor.load(FAMILY, folder, **OPTIONS)


@torch.no_grad()
def published(pipeline: Any, caption: str, images: list[Image.Image], pixels: int) -> tuple[torch.Tensor, ...]:
    """Return what diffusers makes of a caption with images, in float32 and in float64."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    sizes = [calculate_dimensions(pixels, one.width / one.height) for one in images]
    resized = [pipeline.image_processor.resize(one, h, w) for one, (w, h, _) in zip(images, sizes, strict=True)]
    wide = copy.deepcopy(pipeline).to(torch.float64)
    return tuple(one.encode_prompt(caption, image=resized, device=CPU)[0][0] for one in (pipeline, wide))


def assert_as_published(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    limit = 4 * float((plain - exact).abs().max())
    assert ours.shape == exact.shape
    assert 0 < limit < 1e-3 * float(exact.abs().max())
    assert float((ours - exact).abs().max()) <= limit


def check_conditions(folder: Path, data: Path, pipeline: Any, references: int, pixels: int) -> None:
    rows = rows_of(processor_of(folder), str(data), length=400, shuffle=False)
    assert rows.bad_samples == ()
    batch = rows.batch(range(len(rows)))
    assert sum(batch.counts[name] for name in ("latents", "text")) == batch.counts["tokens"]
    encoders = encoders_of(folder)
    for dropped in ((), tuple(range(len(batch.segments["text"].lengths)))):
        encoded = encoders.encode(batch, dropped)
        assert encoded.segments["text"].lengths == batch.segments["text"].lengths, (
            "headers tell the number of embeddings"
        )
        texts = iter(torch.split(encoded["text"], [n for n in encoded.segments["text"].lengths if n]))
        for id in batch.sample_ids:
            number = int(id[1:])
            images = [Image.open(data.parent / f"{number}-{one}.png") for one in range(references)]
            plain, exact = published(pipeline, "" if dropped else CAPTIONS[number], images, pixels)
            text = next(texts)
            assert not text[len(exact) :].any(), "behind an empty caption there are zeros"
            assert_as_published(text[: len(exact)], plain, exact)
    owners = batch["reference_sample"].tolist()
    assert len(owners) == references * len(CAPTIONS)
    for height, width in (shape[1:] for shape in batch.shapes["references"]):
        assert height % 32 == width % 32 == 0
        assert 0.5 < height * width / OPTIONS["reference_pixels"] < 2


@pytest.mark.slow
def test_training_reads_captions_with_images_as_diffusers_does(world: tuple[Path, Any]) -> None:
    folder, pipeline = world
    check_conditions(folder / "model", folder / "edits.jsonl", pipeline, 1, OPTIONS["reference_pixels"])


@pytest.mark.slow
def test_training_reads_captions_with_several_images_as_diffusers_does(tmp_path: Path) -> None:
    """The text encoder is shown smaller images than the VAE, numbered."""
    pipeline = write_qwen_image(tmp_path / "model", plus=True)
    check_conditions(tmp_path / "model", write_set(tmp_path, 2), pipeline, 2, 384 * 384)


@torch.no_grad()
def test_training_and_sampling_encode_alike(world: tuple[Path, Any]) -> None:
    folder = world[0] / "model"
    rows = rows_of(processor_of(folder), str(world[0] / "edits.jsonl"), length=400, pack=False, shuffle=False)
    at = next(number for number in range(len(rows)) if rows.batch([number]).sample_ids == ("s1",))
    trained = encoders_of(folder).encode(rows.batch([at]), ())["text"]
    reference = Image.open(world[0] / "1-0.png")
    sampled = []
    for dtype in (torch.float32, torch.float64):
        encoders, pixels = encoders_of(folder, dtype), OPTIONS["reference_pixels"]
        (embedding,) = encoders.edit_prompts([CAPTIONS[1]], [reference], pixels, CPU)
        assert embedding.tokens is not None
        sampled.append(embedding.tokens)
    assert_as_close(trained, *sampled, what="in training, beside in sampling")


def bad_of(rows: PackedRows) -> dict[str, str]:
    return {bad.id: bad.code for bad in rows.bad_samples}


def test_rows_that_cannot_be_edits_are_left_out_with_the_reason(world: tuple[Path, Any], tmp_path: Path) -> None:
    for number in range(3):
        image(number).save(tmp_path / f"{number}.png")
    Image.new("RGB", (4000, 10)).save(tmp_path / "narrow.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    named = {
        "good": ["1.png"],
        "none": [],
        "two": ["1.png", "2.png"],
        "broken": ["broken.png"],
        "narrow": ["narrow.png"],
        "torn": ["torn.png"],
        "gone": ["gone.png"],
    }
    rows = [{"id": id, "path": "0.png", "cap": "a kite", "references": names} for id, names in named.items()]
    rows.append({"id": "word", "path": "0.png", "cap": "a <|image_pad|>", "references": ["1.png"]})
    data = str(write_jsonl(tmp_path / "e.jsonl", rows))
    packed = rows_of(processor_of(world[0] / "model"), data, length=400, max_bad_share=1.0)
    bad = bad_of(packed)
    assert set(bad) == {"none", "two", "broken", "narrow", "gone", "word"}
    assert bad["none"] == bad["two"] == "generation.wrong-edit-image-count"
    assert bad["narrow"] == "generation.edit-image-too-narrow"
    assert bad["word"] == "generation.control-word-in-caption"
    read = packed.batch(range(len(packed)))
    assert [bad.id for bad in read.problems] == ["torn"], "its header is whole: it is found when it is decoded"
    encoded = encoders_of(world[0] / "model").encode(read, ())
    assert encoded["clean"].isfinite().all()
    assert sum(encoded.segments["text"].lengths) == read.counts["text"]


def test_a_folder_that_edits_nothing_refuses_images_to_edit(tmp_path: Path) -> None:
    data = write_set(tmp_path)
    write_qwen_image(tmp_path / "model")
    with raises("data.too-many-bad-samples"):
        rows_of(processor_of(tmp_path / "model"), str(data), length=400)


# ---------------------------------------------------------------------------------------------- runs


def recipe(folder: Path, data: Path, **options: Any) -> dict[str, Any]:
    encoders = {"text": {"dtype": "float32", "residence": "device"}}
    return {
        "model": {"path": str(folder / "model")},
        "data": {"kind": "generation", "train": str(data), "length": 300, "workers": 0, "processor": dict(OPTIONS)},
        "train": {
            "steps": 4,
            "global_batch": 2,
            "micro_batch": 1,
            "device": "cpu",
            "task_options": {"caption_dropout": 0.5, "encoders": encoders, **options},
        },
        "optim": {"lr": 0.01},
        "log": {"every": 1},
        "checkpoint": {"every": 2, "prove": "never"},
    }


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def moved_recipe(folder: Path, target: Path, seed: int) -> dict[str, Any]:
    """Return the recipe with encoders whose weights are moved by one rounding, which it writes to `target`."""
    shutil.copytree(folder / "model", target / "model")
    for part in ("vae", "text_encoder"):
        for path in (target / "model" / part).glob("*.safetensors"):
            tensors = load_file(path)
            move_by_a_rounding([one for one in tensors.values() if one.is_floating_point()], seed)
            save_file(tensors, path, {"format": "pt"})
    changed = recipe(folder, folder / "edits.jsonl")
    changed["train"]["task_options"]["encoders"]["folder"] = str(target / "model")
    return {**changed, "out": str(target / "run")}


@pytest.mark.slow
def test_training_on_features_equals_training_online(world: tuple[Path, Any], tmp_path: Path) -> None:
    folder = world[0]
    online = recipe(folder, folder / "edits.jsonl")
    done = write_features(online, tmp_path / "features", batch=3)
    assert (done.samples, done.missing, done.bad) == (4, 0, [])
    stored = recipe(folder, tmp_path / "features", encoders=None)
    together = recipe(folder, folder / "edits.jsonl")
    together["train"]["task_options"]["encoders"]["steps"] = 2
    measured = [
        losses(tessera.train({**chosen, "out": str(tmp_path / str(number))}))
        for number, chosen in enumerate((online, stored, together))
    ]
    assert len(measured[0]) == 4
    # Encoders that see other samples beside a sample round otherwise, and four steps of training carry that on: as far
    # as encoders do whose weights were moved by a rounding.
    moved = [losses(tessera.train(moved_recipe(folder, tmp_path / f"moved-{seed}", seed))) for seed in (0, 1)]
    plain, stored_losses, *others = ({"losses": torch.tensor(chosen)} for chosen in (measured[0], measured[1], *moved))
    assert_within_rounding(stored_losses, plain, *others)
    assert measured[0] == measured[2]
    assert measured[0][0] != measured[0][1]


@pytest.mark.slow
def test_a_dropped_caption_of_features_is_the_empty_one_with_the_image(world: tuple[Path, Any]) -> None:
    folder = world[0]
    rows = rows_of(processor_of(folder / "model"), str(folder / "edits.jsonl"), length=400)
    batch = rows.batch(range(len(rows)))
    everyone = range(len(batch.segments["text"].lengths))
    encoders = encoders_of(folder / "model", stores_empty=True)
    stored, online = encoders.encode(batch, ()), encoders.encode(batch, everyone)
    exact = encoders_of(folder / "model", torch.float64).encode(batch, everyone)["text"]
    assert len(stored["empty_text"]) < len(stored["text"]) / 2, "what a caption begins with is not stored twice"
    assert_as_close(without_captions(stored, everyone)["text"], online["text"], exact)
    assert not torch.equal(online["text"], stored["text"])


@pytest.mark.slow
def test_a_run_that_is_resumed_trains_as_one_that_was_not_stopped(world: tuple[Path, Any], tmp_path: Path) -> None:
    edits = recipe(world[0], world[0] / "edits.jsonl")
    through = tessera.train({**edits, "out": str(tmp_path / "a")})
    part = tessera.train({**edits, "out": str(tmp_path / "b")}, callbacks=[StopAt(2)])
    resumed = tessera.resume(part.folder)
    wanted, stored = (sorted(run.checkpoint.glob("*.safetensors")) for run in (through, resumed))
    assert [path.name for path in wanted] == [path.name for path in stored] != []
    for tensors, other in zip(map(load_file, wanted), map(load_file, stored), strict=True):
        assert tensors.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
    assert len(set(losses(through))) == 4
