"""VAEs and text encoders of a diffusers folder give what diffusers' own pipelines compute with them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera.core.spec import Component
from tessera.core.task import FrozenModule
from tessera.diffusion.autoencoders import VAES, Autoencoder
from tessera.diffusion.captions import (
    Captions,
    EncodedPaddingCaptions,
    TextEmbedding,
    TextEncoder,
    ZeroPaddedCaptions,
    joined,
)
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.parallel.frozen import frozen_bytes
from tessera.parallel.mesh import Axes
from tests.errors import raises
from tests.quick import quick
from tests.toys.pipeline_folder import TEXT_SIZE, VAE_CONFIG, VOCABULARY, write_pipeline_folder

OFFLOADED = Component(lambda _: nn.Module(), trained=False, residence="offloaded", stage="first")
CAUSAL = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "latents_mean": [0.1] * 4}
LEVELS = {"latent_channels": 4, "block_out_channels": (4, 4, 4, 4), "layers_per_block": 1}
TINY: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "latent_channels": 4,
        "block_out_channels": (4, 4, 4),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "norm_num_groups": 2,
        "scaling_factor": 0.4,
        "shift_factor": 0.1,
    },
    "AutoencoderKLWan": {**CAUSAL, "latents_std": [2.0] * 4},
    "AutoencoderKLQwenImage": {**CAUSAL, "latents_std": [2.0] * 4},
    "AutoencoderKLHunyuanVideo": {**LEVELS, "norm_num_groups": 2},
    "AutoencoderKLHunyuanVideo15": {**LEVELS, "block_out_channels": (8, 8, 8, 8, 8)},
    "AutoencoderKLCogVideoX": {**LEVELS, "norm_num_groups": 2},
    "AutoencoderKLLTXVideo": {
        **LEVELS,
        "decoder_block_out_channels": (4, 4, 4, 4),
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
        "scaling_factor": 2.0,
    },
}


def tiny(name: str) -> tuple[nn.Module, Autoencoder]:
    import diffusers

    torch.manual_seed(1)
    vae = getattr(diffusers, name)(**TINY[name]).eval()
    if name == "AutoencoderKLLTXVideo":
        vae.latents_mean.fill_(0.3)
        vae.latents_std.fill_(1.7)
    return vae, VAES[name](vae, VAES[name].form_of(vae.config))


def published(name: str, vae: Any, raw: torch.Tensor) -> torch.Tensor:
    """Return latents as the pipelines of this VAE give them to their transformers."""
    if name in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
        return (raw - 0.1) / 2.0
    if name == "AutoencoderKLLTXVideo":
        return (raw - 0.3) * vae.config.scaling_factor / 1.7
    if name == "AutoencoderKL":
        return (raw - vae.config.shift_factor) * vae.config.scaling_factor
    return raw * vae.config.scaling_factor


@torch.no_grad()
@pytest.mark.parametrize("name", quick(sorted(VAES), "AutoencoderKL", "AutoencoderKLCogVideoX", "AutoencoderKLWan"))
def test_latents_are_scaled_as_published_and_decoded_back(name: str) -> None:
    vae, coder = tiny(name)
    form = coder.form
    frames = 1 if form.images_only else 1 + 2 * form.time_stride
    videos = [torch.randint(0, 256, (frames, 32, 64 - 32 * n, 3), dtype=torch.uint8) for n in (0, 1, 0)]
    latents = coder.encode(videos)
    for video, values in zip(videos, latents, strict=True):
        assert tuple(values.shape) == (form.channels, *form.latent_shape(*video.shape[:3]))
        pixels = (video.permute(3, 0, 1, 2).float() / 127.5 - 1)[None]
        raw = vae.encode(pixels[:, :, 0] if form.images_only else pixels).latent_dist.mode()  # type: ignore[operator]
        wanted = published(name, vae, raw)
        assert torch.allclose(values, (wanted.unsqueeze(2) if form.images_only else wanted)[0], rtol=1e-4, atol=1e-4)
    back = coder.decode(latents)
    assert [tuple(video.shape) for video in back] == [tuple(video.shape) for video in videos]
    assert all(video.dtype == torch.uint8 for video in back)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline_folder(tmp_path_factory.mktemp("pipeline"))


@torch.no_grad()
def test_parts_are_read_from_the_folder(folder: Path) -> None:
    from diffusers import AutoencoderKLWan

    parts = PipelineFolder(folder)
    coder = parts.autoencoder(tiling=True, slicing=True)
    assert coder.vae.use_tiling
    assert coder.vae.use_slicing
    whole = AutoencoderKLWan.from_pretrained(folder / "vae")
    for (name, ours), (other, theirs) in zip(coder.vae.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
    assert parts.vae_form().mean == tuple(VAE_CONFIG["latents_mean"])
    described = parts.text_encoder(Captions(), meta=True)
    assert all(p.is_meta for p in described.parameters())
    assert [n for n, _ in described.named_parameters()] == [
        n for n, _ in parts.text_encoder(Captions()).named_parameters()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_without_weights_take_as_many_bytes_as_parts_that_are_read(folder: Path, dtype: torch.dtype) -> None:
    parts = PipelineFolder(folder)
    for make in (parts.autoencoder, partial(parts.text_encoder, Captions())):
        planned, read = (
            frozen_bytes(make(dtype=dtype, meta=meta), OFFLOADED, Axes({}, {}), None) for meta in (True, False)
        )
        assert planned == read


@torch.no_grad()
@pytest.mark.parametrize("kind", [Captions, ZeroPaddedCaptions, EncodedPaddingCaptions])
def test_captions_are_embedded_alone_or_together(folder: Path, kind: type[Captions]) -> None:
    reader = kind(length=6, skip=1)
    encoder = PipelineFolder(folder).text_encoder(reader)
    captions = [torch.tensor([3, 4, 5, 1]), torch.tensor([9, 1]), torch.arange(2, 20)]
    together = [embedding.tokens for embedding in encoder.encode(captions)]
    for caption, tokens in zip(captions, together, strict=True):
        (alone,) = encoder.encode([caption])
        assert tokens is not None
        assert alone.tokens is not None
        assert torch.allclose(tokens, alone.tokens, atol=1e-5)
        assert tokens.shape == (reader.embeddings(len(caption)), TEXT_SIZE)
    assert together[1] is not None
    zeros = 5 if kind is ZeroPaddedCaptions else 0
    assert int((together[1] == 0).all(1).sum()) == zeros
    assert encoder.encode([]) == []


@torch.no_grad()
def test_two_clip_encoders_lie_beside_each_other_before_t5(folder: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(2)
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=7,
        projection_dim=5,
        eos_token_id=1,
    )
    clip = CLIPTextModelWithProjection(config).eval()
    first = EncodedPaddingCaptions(length=7, masked=False, layer=-2, pooled=True, pad=1)
    readers = (first, replace(first, beside=True), Captions(length=4))
    encoders = [TextEncoder(clip, reader, 1) for reader in readers[:2]]
    ids = torch.tensor([5, 6, 1])
    embeddings = [encoder.encode([ids])[0] for encoder in encoders]
    embeddings.append(TextEmbedding(torch.ones(4, TEXT_SIZE + 4), None))
    whole = joined(readers, embeddings)
    reference = clip(torch.tensor([[5, 6, 1, 1, 1, 1, 1]]), output_hidden_states=True)
    assert whole.tokens is not None
    assert whole.pooled is not None
    hidden = reference.hidden_states[-2][0]
    assert torch.allclose(whole.tokens[:7, :16], torch.cat([hidden, hidden], -1), atol=1e-6)
    assert not whole.tokens[:7, 16:].any()
    assert torch.equal(whole.tokens[7:], torch.ones(4, TEXT_SIZE + 4))
    assert torch.allclose(whole.pooled, reference.text_embeds[0].repeat(2), atol=1e-6)


def test_a_folder_chooses_no_class_and_no_pickle(folder: Path, tmp_path: Path) -> None:
    with raises("generation.not-a-pipeline-folder"):
        PipelineFolder(tmp_path).autoencoder()
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", "StableDiffusionPipeline"]}))
    with raises("generation.unknown-vae", "StableDiffusionPipeline") as caught:
        PipelineFolder(tmp_path).autoencoder()
    assert caught.value.allowed is not None
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/config.json").write_text((folder / "text_encoder/config.json").read_text())
    (tmp_path / "text_encoder/pytorch_model.bin").write_bytes(b"not read")
    with raises("weights.pickle-refused"):
        PipelineFolder(tmp_path).text_encoder(Captions())


def test_an_offloaded_part_returns_to_the_host_unchanged() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    frozen = FrozenModule(layer, torch.device("cpu"), "offloaded")
    with frozen.use() as module:
        assert not module(torch.ones(1, 2)).requires_grad
    assert torch.equal(layer.weight, before)
    assert not layer.weight.requires_grad
