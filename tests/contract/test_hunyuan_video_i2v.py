"""Training of HunyuanVideo I2V, where the text encoder reads the first frame, and of 1.5, where its embeddings are
elements of the main sequence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tessera
from tessera.core.task import FrozenModule
from tessera.diffusion.autoencoders import VAE
from tessera.diffusion.batches import latent_lengths
from tessera.diffusion.captions import CaptionTokenizer, FrameCaptions
from tessera.diffusion.encoders import Encoders, without_captions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, frame_embeddings, prepared
from tessera.diffusion.hunyuan_video.config import HunyuanVideoConfig
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.processor import GenerationProcessor
from tessera.tools.data_features import write_features
from tests.close import assert_as_close, distance
from tests.errors import raises
from tests.toys.generation_set import rows_of, write_image, write_jsonl, write_video
from tests.toys.sampling_folders import write_hunyuan_video_1_5_i2v, write_hunyuan_video_i2v

CPU = torch.device("cpu")
FAMILY = HunyuanVideo15Config(in_channels=9, out_channels=4).generation()
LENGTH = 700  # of which the template of a caption is most
CAPTIONS = ("a red kite", "the blue dog moving left", "cat")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A pipeline with random weights in a folder, and the same in diffusers; and a set of videos."""
    folder = tmp_path_factory.mktemp("i2v")
    rows = []
    for number, caption in enumerate(CAPTIONS):
        write_video(folder / f"{number}.mp4", 5 + 4 * number, size=(48, 32))
        rows.append({"id": f"s{number}", "path": f"{number}.mp4", "cap": caption})
    write_jsonl(folder / "videos.jsonl", rows)
    return folder, write_hunyuan_video_1_5_i2v(folder / "model")


@torch.no_grad()
def test_a_first_frame_is_embedded_as_diffusers_does(world: tuple[Path, Any]) -> None:
    folder, pipeline = world
    encoder = PipelineFolder(folder / "model").frame_encoder()
    frame = Image.fromarray(np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8))
    wide = copy.deepcopy(pipeline.image_encoder).double()
    plain, exact = (
        pipeline._get_image_embeds(module, pipeline.feature_extractor, frame, CPU)[0]
        for module in (pipeline.image_encoder, wide)
    )
    (embeds,) = encoder.encode([torch.from_numpy(np.array(frame))])
    assert_as_close(embeds, plain, exact)
    assert len(embeds) == frame_embeddings(folder / "model") == 4
    # Of another size it is resized, by Pillow there: both round to whole levels, of which they are one apart at most.
    large = frame.resize((60, 50), Image.Resampling.BICUBIC)
    theirs = pipeline.feature_extractor(images=large, return_tensors="pt").pixel_values[0]
    ours = prepared(torch.from_numpy(np.array(large)), encoder.form)
    assert float((ours - theirs).abs().max()) <= 1.001 / 127.5


def test_embeddings_have_their_place_between_text_and_latents(world: tuple[Path, Any]) -> None:
    folder = world[0] / "model"
    processor = GenerationProcessor.load(FAMILY, folder, num_frames=13)
    rows = rows_of(processor, str(world[0] / "videos.jsonl"), length=LENGTH, shuffle=False, pack=False)
    assert rows.bad_samples == ()
    batch = rows.batch(range(len(rows)))
    parts = PipelineFolder(folder)
    modules = {
        VAE: parts.autoencoder(),
        "text_encoder": parts.text_encoder(FAMILY.captions[0]),
        IMAGE_ENCODER: parts.frame_encoder(),
    }
    frozen = {name: FrozenModule(module, CPU, "device") for name, module in modules.items()}
    encoded = Encoders(FAMILY, frozen, parts, "first").encode(batch, ())
    texts, embeds = (encoded.segments[name].lengths for name in ("text", "image_embeds"))
    assert [one for one in embeds if one] == [4, 4, 4]
    assert len(encoded["image_embeds"]) == len(encoded["image_embeds_index"]) == 12
    indices = [encoded[f"{name}_index"] for name in ("text", "image_embeds", "latent")]
    assert sorted(torch.cat(indices).tolist()) == list(range(LENGTH * len(rows))), "every element has one kind"
    latents = [
        whole - text - more
        for whole, text, more in zip(encoded.segments["latents"].lengths, texts, embeds, strict=True)
    ]
    assert latent_lengths(encoded, FAMILY) == latents
    assert len(encoded["clean"]) == len(encoded["latent_index"]) == sum(latents)
    assert not encoded["positions"][:, encoded["image_embeds_index"]].any(), "they are not rotated"
    trained = encoded["condition"][encoded["trained"]]
    assert trained[:, -1].unique().tolist() == [0, 1], "a mask of latent frames"


def recipe(world: Path, train: Path, **options: Any) -> dict[str, Any]:
    encoders = {"text": {"dtype": "float32", "residence": "device"}}
    return {
        "model": {"path": str(world / "model")},
        "data": {
            "kind": "generation",
            "train": str(train),
            "length": LENGTH,
            "workers": 0,
            "pack": False,
            "processor": {"num_frames": 13},
        },
        "train": {
            "steps": 3,
            "global_batch": 2,
            "micro_batch": 1,
            "device": "cpu",
            "task_options": {"given": "first", "encoders": encoders, **options},
        },
        "optim": {"lr": 0.01},
        "log": {"every": 1},
        "checkpoint": {"prove": "never"},
    }


@pytest.mark.slow
def test_training_on_features_is_training_on_videos(world: tuple[Path, Any], tmp_path: Path) -> None:
    """Encoders see one sample at a time in both, so that not even the last bit differs."""
    folder = world[0]
    online = recipe(folder, folder / "videos.jsonl")
    write_features(online, tmp_path / "features", batch=1)
    stored = recipe(folder, tmp_path / "features")
    runs = [tessera.train({**one, "out": str(tmp_path / name)}) for one, name in ((online, "a"), (stored, "b"))]
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in runs]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    (again,) = tessera.pipeline(runs[0].folder, device="cpu").generate(
        "a kite", images=[Image.new("RGB", (64, 64), "red")], height=64, width=64, frames=5, steps=1
    )
    assert again.frames.shape == (5, 64, 64, 3)


def test_what_such_a_model_needs_is_asked_for(world: tuple[Path, Any], tmp_path: Path) -> None:
    folder = world[0]
    with raises("generation.given-frames-mismatch"):
        tessera.plan(recipe(folder, folder / "videos.jsonl", given="none"), world=1)
    with raises("generation.missing-image-encoder", "image_encoder"):
        frame_embeddings(tmp_path)


# ---------------------------------------------------------------------------------------------- the first generation


CONDITIONS = ["token_replace", pytest.param("latent_concat", marks=pytest.mark.slow)]


def first_family(condition: Any) -> GenerationFamily:
    channels = 9 if condition == "latent_concat" else 4
    return HunyuanVideoConfig(in_channels=channels, out_channels=4, image_condition_type=condition).generation()


@torch.no_grad()
@pytest.mark.parametrize("condition", CONDITIONS)
def test_captions_are_read_with_the_first_frame_as_diffusers_does(tmp_path: Path, condition: str) -> None:
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as published

    pipeline, reader = write_hunyuan_video_i2v(tmp_path, condition), first_family(condition).captions[0]
    template = published.DEFAULT_PROMPT_TEMPLATE
    assert isinstance(reader, FrameCaptions)
    assert reader.template == template["template"]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (336, 336, 3), dtype=np.uint8))
    captions, frame = CaptionTokenizer.load(tmp_path, reader), torch.from_numpy(np.array(image))
    narrow, wide = (
        PipelineFolder(tmp_path).text_encoder(reader, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    for caption in ("a red kite moving left", "kite " * 400):  # the second one is cut
        ids = torch.tensor(captions.cut(captions.ids(caption)))
        (ours,), (exact,) = (encoder.encode([ids], [frame]) for encoder in (narrow, wide))
        every = reader.every
        states, mask = pipeline._get_llama_prompt_embeds(image, caption, template, image_embed_interleave=every)
        peer = states[0][mask[0].bool()]
        assert ours.tokens is not None
        assert exact.tokens is not None
        assert len(ours.tokens) == reader.embeddings(len(ids))
        assert distance(peer, exact.tokens) < 1e-5 * distance(exact.tokens, torch.zeros_like(exact.tokens))
        assert_as_close(ours.tokens, peer, exact.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["token_replace", "latent_concat"])
def test_training_on_features_is_training_with_frames_in_captions(tmp_path: Path, condition: str) -> None:
    write_hunyuan_video_i2v(tmp_path / "model", condition)
    rows = []
    for number, caption in enumerate(CAPTIONS):
        write_video(tmp_path / f"{number}.mp4", 5 + 4 * number, size=(48, 32))
        rows.append({"id": f"s{number}", "path": f"{number}.mp4", "cap": caption})
    online = recipe(tmp_path, write_jsonl(tmp_path / "videos.jsonl", rows))
    write_features(online, tmp_path / "features", batch=1)
    stored = recipe(tmp_path, tmp_path / "features")
    runs = [tessera.train({**one, "out": str(tmp_path / name)}) for one, name in ((online, "a"), (stored, "b"))]
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in runs]
    assert losses[0] == losses[1], "encoders see one sample at a time in both"
    assert len(set(losses[0])) == 3


@pytest.mark.slow
@torch.no_grad()
def test_the_empty_caption_of_a_sample_is_read_with_its_own_frame(tmp_path: Path) -> None:
    write_hunyuan_video_i2v(tmp_path, "token_replace")
    for number in range(2):
        write_image(tmp_path / f"{number}.png", (32, 32), 60 * number)
    data = [{"id": f"s{number}", "path": f"{number}.png", "cap": CAPTIONS[number]} for number in range(2)]
    media = str(write_jsonl(tmp_path / "images.jsonl", data))
    family, parts = first_family("token_replace"), PipelineFolder(tmp_path)
    rows = rows_of(GenerationProcessor.load(family, tmp_path), media, length=LENGTH)
    batch = rows.batch(range(len(rows)))
    pairs = []
    for dtype in (torch.float32, torch.float64):
        modules: dict[str, torch.nn.Module] = {VAE: parts.autoencoder()}
        modules |= {reader.encoder: parts.text_encoder(reader, dtype=dtype) for reader in family.captions}
        frozen = {name: FrozenModule(module, CPU, "device") for name, module in modules.items()}
        encoders = Encoders(family, frozen, parts, "first", stores_empty=True)
        everyone = range(len(batch.segments["text"].lengths))
        pairs.append((encoders.encode(batch, ()), encoders.encode(batch, everyone)))
    (stored, online), (_, exact) = pairs
    assert not torch.equal(stored["text"], online["text"])
    assert_as_close(without_captions(stored, everyone)["text"], online["text"], exact["text"])
    first = [text[:144] for text in torch.split(online["text"], [*online.segments["text"].lengths]) if len(text)]
    assert not torch.equal(first[0], first[1]), "the frame is another one"
