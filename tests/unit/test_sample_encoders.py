"""Encoding in every step gives what features would hold; models read given frames as in diffusers' pipelines."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera.config.run_config import load_config
from tessera.core.batch import Batch, Segments
from tessera.core.task import FrozenModule
from tessera.diffusion.batches import pack
from tessera.diffusion.captions import Captions, ZeroPaddedCaptions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.given_images import (
    FirstFrameChannels,
    Given,
    GivenImages,
    MarkedFrameChannels,
    MaskedVideoChannels,
    patchify,
)
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.samples import EncodedMedia
from tests.errors import raises
from tests.toys.pipeline_folder import write_pipeline_folder
from tests.unit.test_task_diffusion import spec_of

FAMILY = GenerationFamily(channels=4, patch=(1, 2, 2), captions=(ZeroPaddedCaptions(length=5),))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline_folder(tmp_path_factory.mktemp("pipeline"))


def online_task(folder: Path, family: GenerationFamily, **options: Any) -> DiffusionTask:
    task = DiffusionTask(encoders={"text": {"dtype": "float32"}}, **options)
    task.bind(spec_of(family), None)
    config = load_config({"name": "encoded", "model": {"path": str(folder)}, "train": {"steps": 1}})
    parts = task.components(config, spec_of(family))
    world: Any = SimpleNamespace(device=CPU)
    task.setup({name: FrozenModule(part.loaded(), CPU, part.residence) for name, part in parts.items()}, world)
    return task


def encoded_inputs(task: DiffusionTask, batch: Batch) -> Batch:
    return task.inputs(*task.encode([batch]))


def media_batch(family: GenerationFamily) -> tuple[Batch, list[torch.Tensor], list[torch.Tensor]]:
    """One row: a video of 5 frames, one that could not be read, an image with the size of its frames, and padding."""
    generator = torch.Generator().manual_seed(3)
    videos = [torch.randint(0, 256, (frames, 32, 32, 3), dtype=torch.uint8, generator=generator) for frames in (5, 1)]
    captions = [torch.tensor([3, 4, 5, 1]), torch.tensor([6, 1])]
    text = [4, 0, 2, 0] if family.captions[0].zeros_to == 0 else [5, 0, 5, 0]
    before = text if family.joint else [0] * 4
    lengths = [8 + before[0], 3, 4 + before[2], 5]
    kinds = torch.cat([torch.arange(length) < words for length, words in zip(lengths, before, strict=True)])
    tensors = {
        "frames": torch.cat([video.reshape(-1, 3) for video in videos]),
        "text_ids": torch.cat(captions),
        "sample_index": torch.repeat_interleave(torch.tensor(lengths)),
        "trained": torch.cat([torch.arange(8), torch.arange(11, 15)]),
    }
    if family.joint:
        tensors |= {"text_index": kinds.nonzero().flatten(), "latent_index": (~kinds).nonzero().flatten()}
    segments = {
        "latents": Segments.of(lengths),
        "text": Segments.of(text),
        "text_ids": Segments.of([4, 0, 2, 0]),
    }
    shapes: dict[str, Any] = {
        "latents": ((2, 2, 2), (1, 1, 3), (1, 2, 2), (1, 1, 5)),
        "frames": ((5, 32, 32), (0, 0, 0), (1, 32, 32), (0, 0, 0)),
    }
    return Batch(tensors, segments, shapes=shapes, seeds=(7,)), videos, captions


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", [Captions, pytest.param(ZeroPaddedCaptions, marks=pytest.mark.slow)])
def test_what_is_encoded_online_is_what_features_hold(folder: Path, joint: bool, kind: type[Captions]) -> None:
    family = replace(FAMILY, joint=joint, captions=(kind(length=5),))
    batch, videos, captions = media_batch(family)
    inputs = encoded_inputs(online_task(folder, family), batch)
    parts = PipelineFolder(folder)
    with torch.no_grad():
        latents = [patchify(values, family.patch) for values in parts.autoencoder().encode(videos)]
        texts = [embedding.tokens for embedding in parts.text_encoder(family.captions[0]).encode(captions)]
    clean = torch.zeros(20, family.patch_values)
    clean[:8], clean[11:15] = latents
    features = replace(batch.with_tensors(clean=clean, text=torch.cat([t for t in texts if t is not None])))
    task = DiffusionTask()
    task.bind(spec_of(family), None)
    wanted = task.inputs(features)
    for name in ("latents", "target", "text", "timesteps", "token_weights"):
        assert torch.allclose(inputs[name], wanted[name], atol=1e-5), name
    assert inputs.segments["text"].lengths == batch.segments["text"].lengths


def test_a_dropped_caption_is_the_empty_caption(folder: Path) -> None:
    batch, _, _ = media_batch(FAMILY)
    inputs = encoded_inputs(online_task(folder, FAMILY, caption_dropout=1.0), batch)
    with torch.no_grad():
        (empty,) = PipelineFolder(folder).text_encoder(FAMILY.captions[0]).encode([torch.tensor([1])])
    assert empty.tokens is not None
    assert empty.tokens[0].any()
    for text in inputs["text"].split((5, 5)):
        assert torch.allclose(text, empty.tokens, atol=1e-5)


def test_images_to_edit_follow_what_is_made_of_them(folder: Path) -> None:
    family = replace(FAMILY, joint=True, captions=(Captions(length=5),))
    image = torch.full((1, 32, 32, 3), 99, dtype=torch.uint8)
    tensors = {
        "frames": torch.zeros(32 * 32, 3, dtype=torch.uint8),
        "references": image.view(-1, 3),
        "reference_sample": torch.tensor([0]),
        "text_ids": torch.tensor([4, 1]),
        "sample_index": torch.zeros(10, dtype=torch.int64),
        "text_index": torch.arange(2),
        "latent_index": torch.arange(2, 10),
        "trained": torch.arange(4),
    }
    bounds = {"latents": Segments.of([10]), "text": Segments.of([2]), "text_ids": Segments.of([2])}
    shapes = {"latents": ((1, 2, 2),), "frames": ((1, 32, 32),), "references": ((1, 32, 32),)}
    inputs = encoded_inputs(online_task(folder, family), Batch(tensors, bounds, shapes=shapes, seeds=(1,)))  # type: ignore[arg-type]
    with torch.no_grad():
        (wanted,) = PipelineFolder(folder).autoencoder().encode([image])
    assert torch.allclose(inputs["latents"][4:], patchify(wanted, family.patch), atol=1e-5)
    assert inputs["trained_here"].tolist() == [True] * 4 + [False] * 4


@torch.no_grad()
@pytest.mark.parametrize("ends", ["first", "first_last"])
def test_given_frames_are_channels_as_in_the_published_pipeline(folder: Path, ends: Given) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline

    coder = PipelineFolder(folder).autoencoder()
    pipeline = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=coder.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        image_processor=None,
        image_encoder=None,
        transformer=None,
    )
    video = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8)
    pixels = video.permute(0, 3, 1, 2).float() / 127.5 - 1
    last = pixels[-1:] if ends == "first_last" else None
    _, condition = pipeline.prepare_latents(
        pixels[:1], 1, 4, 32, 32, 9, dtype=torch.float32, device=CPU, last_image=last
    )

    def channels(images: GivenImages, frames: Given) -> torch.Tensor:
        values = images.channels(coder, video, (4, 3, 4, 4), frames)
        assert values is not None
        return values

    assert condition.shape == (1, 8, 3, 4, 4)
    assert torch.allclose(channels(MaskedVideoChannels(), ends), condition[0], atol=1e-4)
    alone = channels(FirstFrameChannels(), "first")
    (first,) = coder.encode([video[:1]])
    assert torch.allclose(alone[:, :1], first, atol=1e-5)
    assert not alone[:, 1:].any()
    masked = channels(MarkedFrameChannels(), "first")
    assert torch.equal(masked[:4], alone)
    assert (masked[4, 0] == 1).all()  # one channel: the first latent frame is given
    assert not masked[4, 1:].any()


def test_online_encoding_without_a_folder_is_refused() -> None:
    task = DiffusionTask(encoders={})
    task.bind(spec_of(FAMILY), None)
    config = load_config({"name": "encoded", "model": {"family": "wan"}, "train": {"steps": 1}})
    with raises("generation.missing-encoders"):
        task.components(config, spec_of(FAMILY))


def write_image_encoder(pipeline: Path) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(4)
    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    model = CLIPVisionModel(config).eval()
    model.save_pretrained(pipeline / "image_encoder")
    index = json.loads((pipeline / "model_index.json").read_text())
    index["image_encoder"] = ["transformers", "CLIPVisionModel"]
    (pipeline / "model_index.json").write_text(json.dumps(index))
    return model


def test_given_frames_are_embedded_as_clip_does(folder: Path, tmp_path: Path) -> None:
    from PIL import Image
    from transformers import CLIPImageProcessor

    pipeline = shutil.copytree(folder, tmp_path / "pipeline")
    model = write_image_encoder(pipeline)
    family = replace(FAMILY, images=MaskedVideoChannels(required=True), image_embeds=True)
    batch, videos, _ = media_batch(family)
    task = online_task(pipeline, family, given="first_last")
    inputs = encoded_inputs(task, batch)
    assert inputs.segments["image_embeds"].lengths == (10, 0, 10, 0)
    assert inputs["latents"].shape[1] == family.patch_values + 4 * 8
    nothing_readable = encoded_inputs(task, replace(pack(family, [EncodedMedia("", 6)]), seeds=(7,)))
    assert nothing_readable["latents"].shape == (6, family.patch_values + 4 * 8)
    assert nothing_readable["image_embeds"].shape == (0, 8)
    prepare = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    images = [Image.fromarray(video[at].numpy()) for video in videos for at in (0, -1)]
    with torch.no_grad():
        pixels = prepare(images=images, return_tensors="pt").pixel_values
        wanted = model(pixels, output_hidden_states=True).hidden_states[-2]
        moved = model(pixels + 0.5 / 255 / 0.27, output_hidden_states=True).hidden_states[-2]
    # Two ways to resize round to values next to each other at most.
    assert float((inputs["image_embeds"] - wanted.flatten(0, 1)).abs().max()) <= 4 * float((moved - wanted).abs().max())
    features = DiffusionTask(given="first")
    features.bind(spec_of(family), None)
    with raises("data.features-without-frame-embeddings"):
        features.inputs(batch.with_tensors(clean=torch.zeros(20, family.patch_values)))


def test_noise_on_given_images_is_that_of_the_sample_and_some_go_without(folder: Path) -> None:
    family = replace(FAMILY, images=FirstFrameChannels(required=True))
    batch, _, _ = media_batch(family)

    def conditions(**options: Any) -> torch.Tensor:
        inputs = encoded_inputs(online_task(folder, family, given="first", **options), batch)
        return inputs["latents"][:, family.patch_values :]

    plain, noisy = conditions(), conditions(given_noise={})
    assert torch.equal(noisy, conditions(given_noise={})), "the noise follows from the seed of the row"
    moved = (noisy - plain).norm()
    assert 0 < (conditions(given_noise={"mean": -12.0, "std": 0.0}) - plain).norm() < 1e-2 * moved
    assert torch.equal(conditions(given_dropout=1.0), torch.zeros_like(plain))
    with raises("generation.image-dropout-unsupported"):
        online_task(folder, FAMILY, given_dropout=0.5)
