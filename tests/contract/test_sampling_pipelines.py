"""Whole tiny pipelines sample the same pixels as diffusers' own, from the same seed: encoders, model, solver, VAE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tessera
from tessera.config.reader import build
from tessera.diffusion.sampling.pipeline import Pipeline
from tessera.diffusion.sampling.request import MediaRequest
from tests.errors import raises
from tests.toys.sampling_folders import (
    write_cogvideox,
    write_flux,
    write_hunyuan_video_1_5_i2v,
    write_hunyuan_video_i2v,
    write_ltx_video,
    write_qwen_image,
    write_sd3,
    write_wan,
)

SIZE = {"height": 32, "width": 48}
SEED = 5
PROMPTS = ["a red &amp;  kite", "the dog"]  # Wan resolves the entity
NEGATIVE = "blue cat"


def image(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((60, 50), Image.Resampling.BICUBIC)


def assert_same_pixels(ours: np.ndarray, plain: np.ndarray, exact: np.ndarray, what: str) -> None:
    """`plain` and `exact`: what diffusers makes in float32 and in float64, from 0 to 1. Ours is rounded to one of 256
    levels, and otherwise no further from float64 than a few times what diffusers' own float32 is."""
    apart = np.abs(plain.astype(np.float64) - exact).max() * 255
    assert apart < 1, f"{what}: float32 is too coarse to compare pixels"
    assert exact.std() * 255 > 2, f"{what}: a flat image says nothing"
    limit = 0.5 + 4 * apart + 1e-3
    assert np.abs(ours.astype(np.float64) - 255 * exact.reshape(ours.shape)).max() <= limit, what


def sampled_alike(
    pipeline: Any, folder: Path, noise: Callable[[Any, torch.Tensor], Any], theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Compare one sample. `noise`: makes diffusers' argument `latents` of the noise that was drawn."""
    (sample,) = tessera.pipeline(folder, device="cpu").generate(
        PROMPTS[0], negative=NEGATIVE, steps=3, seed=SEED, **SIZE, **ours
    )
    assert_same_pixels(sample.frames, *reference_pixels(pipeline, noise, theirs, ours), folder.name)


def reference_pixels(
    pipeline: Any, noise: Callable[[Any, torch.Tensor], Any], theirs: dict[str, Any], ours: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what diffusers makes in float32 and in float64."""
    shared = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "num_inference_steps": 3, "output_type": "np", **SIZE}
    shared |= theirs
    plain = pipeline(**shared, generator=torch.Generator().manual_seed(SEED))[0][0]
    wide = copy.deepcopy(pipeline).to(torch.float64)
    drawn = torch.randn(noise_shape(pipeline, ours), generator=torch.Generator().manual_seed(SEED))
    return plain, wide(**shared, latents=noise(wide, drawn.double()))[0][0]


def noise_shape(pipeline: Any, ours: dict[str, Any]) -> tuple[int, ...]:
    channels = pipeline.vae.config.get("z_dim") or pipeline.vae.config.latent_channels
    joined = pipeline.transformer.config.get("patch_size_t") or 1
    frames = () if "frames" not in ours else (-(-((ours["frames"] - 1) // 4 + 1) // joined) * joined,)
    first = (*frames, channels) if type(pipeline).__name__.startswith("CogVideoX") else (channels, *frames)
    return (1, *first, SIZE["height"] // 8, SIZE["width"] // 8)


def as_drawn(pipeline: Any, noise: torch.Tensor) -> torch.Tensor:
    return noise


def as_tokens(pipeline: Any, noise: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = noise.shape
    return pipeline._pack_latents(noise, batch, channels, height, width)  # type: ignore[no-any-return]


VIDEO = {"num_frames": 5, "guidance_scale": 5.0}
WAN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "from text": ({}, VIDEO, {"frames": 5, "guidance": 5.0}),
    "from an image": (
        {"image": True, "embeds": 1},
        {**VIDEO, "image": image(0)},
        {"frames": 5, "guidance": 5.0, "images": [image(0)]},
    ),
    "from two images": (
        {"image": True, "embeds": 2},
        {**VIDEO, "image": image(0), "last_image": image(1)},
        {"frames": 5, "guidance": 5.0, "images": [image(0)], "last_image": image(1)},
    ),
    "two experts": (
        {"experts": 2},
        {**VIDEO, "guidance_scale_2": 3.0},
        {"frames": 5, "guidance": 5.0, "guidance_2": 3.0},
    ),
    "from an image, with times of tokens": (
        {"image": True, "token_times": True},
        {**VIDEO, "image": image(0)},
        {"frames": 5, "guidance": 5.0, "images": [image(0)]},
    ),
}


SOME = ("from an image",)


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in WAN])
def test_wan_samples_the_pixels_of_diffusers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    # The second is written as if ftfy were always there; the first does without it.
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)
    written, theirs, ours = WAN[name]
    sampled_alike(write_wan(tmp_path, **written), tmp_path, as_drawn, theirs, ours)


def test_flux_samples_the_pixels_of_diffusers(tmp_path: Path) -> None:
    pipeline = write_flux(tmp_path)
    theirs = {"guidance_scale": 3.5, "true_cfg_scale": 2.0}
    sampled_alike(pipeline, tmp_path, as_tokens, theirs, {"guidance": 3.5, "true_guidance": 2.0})


@pytest.mark.slow
def test_stable_diffusion_3_samples_the_pixels_of_diffusers(tmp_path: Path) -> None:
    pipeline = write_sd3(tmp_path)
    sampled_alike(pipeline, tmp_path, as_drawn, {"guidance_scale": 7.0}, {"guidance": 7.0})


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_cogvideox_samples_the_pixels_of_diffusers(tmp_path: Path, dynamic: bool) -> None:
    pipeline = write_cogvideox(tmp_path)
    theirs = {"num_frames": 5, "guidance_scale": 6.0, "use_dynamic_cfg": dynamic}
    ours = {"frames": 5, "guidance": 6.0, "dynamic_guidance": dynamic}
    sampled_alike(pipeline, tmp_path, as_drawn, theirs, ours)


@pytest.mark.slow
def test_frames_that_do_not_fill_a_patch_are_sampled_as_diffusers_does(tmp_path: Path) -> None:
    """Nine frames are three latent frames: a fourth is sampled, and dropped."""
    pipeline = write_cogvideox(tmp_path, newer=True)
    sampled_alike(
        pipeline, tmp_path, as_drawn, {"num_frames": 9, "guidance_scale": 6.0}, {"frames": 9, "guidance": 6.0}
    )


@pytest.mark.slow
def test_hunyuan_video_1_5_continues_an_image_as_diffusers_does(tmp_path: Path) -> None:
    """Its pipeline crops the image to a size that follows from the image's own."""
    pipeline = write_hunyuan_video_1_5_i2v(tmp_path)
    first = image(0)
    height, width = pipeline.video_processor.calculate_default_height_width(*first.size[::-1], 64)
    options = {"height": height, "width": width, "frames": 5, "guidance": 6.0, "images": [first]}
    sampler = tessera.pipeline(tmp_path, device="cpu")
    (sample,) = sampler.generate(PROMPTS[0], negative=NEGATIVE, steps=3, seed=SEED, **options)
    shared = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "num_inference_steps": 3, "num_frames": 5}
    plain = pipeline(first, **shared, generator=torch.Generator().manual_seed(SEED))[0][0]
    drawn = torch.randn(1, 4, 2, height // 16, width // 16, generator=torch.Generator().manual_seed(SEED))
    exact = copy.deepcopy(pipeline).to(torch.float64)(first, **shared, latents=drawn.double())[0][0]
    assert_same_pixels(sample.frames, plain, exact, "HunyuanVideo 1.5")
    with raises("generation.missing-first-frame"):
        sampler.generate("a kite", height=64, width=64, frames=5)


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["token_replace", "latent_concat"])
def test_hunyuan_video_continues_an_image_as_diffusers_does(tmp_path: Path, condition: str) -> None:
    pipeline, concat = write_hunyuan_video_i2v(tmp_path, condition), condition == "latent_concat"
    theirs = {"image": image(0), "num_frames": 9, "true_cfg_scale": 3.0, "guidance_scale": 6.0}
    ours: dict[str, Any] = {"frames": 9, "images": [image(0)]}
    ours |= {"guidance": 3.0} if concat else {"guidance": 6.0, "true_guidance": 3.0}
    sampled_alike(pipeline, tmp_path, as_drawn, theirs, ours)


@pytest.mark.slow  # the edits take the same steps
def test_qwen_image_samples_the_pixels_of_diffusers(tmp_path: Path) -> None:
    pipeline = write_qwen_image(tmp_path)
    sampled_alike(pipeline, tmp_path, as_tokens, {"true_cfg_scale": 4.0}, {"guidance": 4.0})


def test_a_model_edits_as_many_images_as_its_template_shows(tmp_path: Path) -> None:
    write_qwen_image(tmp_path, edit=True)
    with raises("generation.wrong-edit-image-count"):
        tessera.pipeline(tmp_path, device="cpu").generate("a cat", images=[image(0), image(1)], steps=1, **SIZE)


def test_qwen_image_edits_as_diffusers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

    pipeline = write_qwen_image(tmp_path, edit=True)
    sizes = edit.calculate_dimensions  # references are a million pixels there, which is long on a CPU
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: sizes(64 * 64, ratio))
    ours = {"guidance": 4.0, "images": [image(0)], "reference_pixels": 64 * 64}
    sampled_alike(pipeline, tmp_path, as_tokens, {"true_cfg_scale": 4.0, "image": image(0)}, ours)


@pytest.mark.slow
def test_qwen_image_edits_several_images_as_diffusers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit

    pipeline = write_qwen_image(tmp_path, plus=True)
    monkeypatch.setattr(edit, "VAE_IMAGE_SIZE", 64 * 64)
    both = [image(0), image(1).resize((40, 90))]
    ours = {"guidance": 4.0, "images": both, "reference_pixels": 64 * 64}
    sampled_alike(pipeline, tmp_path, as_tokens, {"true_cfg_scale": 4.0, "image": both}, ours)


@pytest.mark.slow
def test_ltx_video_reads_captions_as_diffusers_does(tmp_path: Path) -> None:
    pipeline = write_ltx_video(tmp_path)
    ours = tessera.pipeline(tmp_path, device="cpu")
    request = ours.resolved(build(MediaRequest, {"prompts": PROMPTS, "height": 64, "width": 64, "frames": 9}, "test"))
    for text, embedding in ours.prepare(request).prompts.items():
        theirs, mask, *_ = pipeline.encode_prompt(text, do_classifier_free_guidance=False)
        wide = copy.deepcopy(pipeline).to(torch.float64)
        exact = wide.encode_prompt(text, do_classifier_free_guidance=False)[0][mask]
        # The encoder reads 128 tokens, most of them padding; the model reads what it makes of the words alone.
        assert embedding.tokens.shape == exact.shape
        limit = 4 * float((theirs[mask] - exact).abs().max())
        assert float((embedding.tokens - exact).abs().max()) <= limit, text


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("wan")
    write_wan(folder)
    return tessera.pipeline(folder, device="cpu")


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_batch(wan: Pipeline) -> None:
    options = {"frames": 5, "steps": 2, "seed": SEED, "count": 2, **SIZE}
    alone = wan.generate(PROMPTS, **options)
    together = wan.generate(PROMPTS, batch=4, **options)
    assert [(single.prompt, single.seed) for single in alone] == [
        (text, SEED + n) for n, text in enumerate(np.repeat(PROMPTS, 2))
    ]
    for single, other in zip(alone, together, strict=True):
        # Rounding differs between sizes of a batch, and may move a value over the border of a level.
        assert np.abs(single.frames.astype(int) - other.frames.astype(int)).max() <= 1
    assert len({single.digest for single in alone}) == 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"height": 40}, "generation.size-not-whole-patches --height 32 48"),
        ({"frames": 4}, "generation.size-not-whole-patches --frames"),
        ({"images": [image(0)]}, "generation.model-reads-no-image"),
        ({"guidance_2": 2.0}, "generation.model-has-one-expert"),
        ({"true_guidance": 2.0}, "generation.no-embedded-guidance"),
        ({"solver": "eulr"}, "generation.unknown-solver"),
        ({"steps": 0}, "recipe.wrong-value"),
        ({"step": 3}, "recipe.unknown-key"),
    ],
)
def test_what_a_model_cannot_make_is_refused(wan: Pipeline, options: dict[str, Any], error: str) -> None:
    with raises(error):
        wan.generate("a cat", **{**SIZE, "frames": 5, "steps": 1, **options})


def test_a_vae_that_cannot_be_read_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_wan(tmp_path)
    (weights,) = (tmp_path / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    steps: list[tuple[int, ...]] = []
    pipeline = tessera.pipeline(tmp_path, device="cpu")
    with raises("generation.incomplete-pipeline-folder"):
        pipeline.generate("a cat", frames=5, steps=2, on_step=lambda *step: steps.append(step), **SIZE)
    assert not steps
