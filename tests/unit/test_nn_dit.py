"""Blocks of diffusion transformers: what is computed once per sample, angles of several axes, norms over all heads."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed, get_timestep_embedding
from torch import nn

from tessera.core.batch import Batch
from tessera.nn.dit import (
    FeatureRMSNorm,
    Modulation,
    gated_sum,
    modulated_norm,
    spread,
    time_index,
    timestep_features,
)
from tessera.ops.pointwise import axes_angles, rotate


@pytest.mark.parametrize("size", [16, 9])
def test_features_of_time_are_those_of_diffusers(size: int) -> None:
    times = torch.tensor([0.0, 0.5, 999.0])
    expected = get_timestep_embedding(times, size, flip_sin_to_cos=True, downscale_freq_shift=0.0)
    assert torch.allclose(timestep_features(times, size), expected, atol=1e-6)


def test_what_a_sample_has_once_reaches_its_tokens_and_its_gradient_comes_back() -> None:
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 0, 1, 1, 1, 2])
    weights = torch.randn(6, 4, dtype=torch.float64)
    assert torch.equal(spread(values, index), values[index])
    ours = torch.autograd.grad((spread(values, index) * weights).sum(), values)[0]
    plain = torch.autograd.grad((values[index] * weights).sum(), values)[0]
    assert torch.allclose(ours, plain, atol=1e-12)
    assert spread(values[:1], torch.zeros(6, dtype=torch.int64)).shape == (1, 4)  # broadcast


def test_times_belong_to_samples_or_to_elements() -> None:
    samples = torch.tensor([0, 0, 0, 1])
    of_samples = Batch({"timesteps": torch.tensor([3.0, 4.0]), "sample_index": samples})
    assert torch.equal(time_index(of_samples), samples)
    of_elements = of_samples.with_tensors(timesteps=torch.arange(4.0))
    assert time_index(of_elements) is None
    assert torch.equal(spread(torch.eye(4), None), torch.eye(4))
    named = of_samples.with_tensors(time_index=torch.tensor([1, 0, 0, 1]))
    assert time_index(named).tolist() == [1, 0, 0, 1]


def test_half_precision_is_modulated_in_the_type_of_the_modulation() -> None:
    table = Modulation(3, 8)
    nn.init.normal_(table.table)
    x, update = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    shift, scale, gate = table(torch.randn(1, 3, 8).bfloat16(), torch.zeros(5, dtype=torch.int64))
    assert gate.dtype == torch.float32
    expected = torch.nn.functional.layer_norm(x.float(), (8,), eps=1e-6) * (1 + scale) + shift
    assert torch.equal(modulated_norm(x, shift, scale), expected.bfloat16())
    assert torch.equal(gated_sum(x, update, gate), (x.float() + update.float() * gate).bfloat16())


def test_neighbouring_dimensions_rotate_by_positions_on_several_axes() -> None:
    positions = torch.tensor([[0, 1, 2], [3, 0, 700], [1, 5, 2]])
    sizes = (4, 2, 6)
    x = torch.randn(3, 2, 12)
    tables = [
        get_1d_rotary_pos_embed(size, at, 1e4, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
        for size, at in zip(sizes, positions, strict=True)
    ]
    cos, sin = (torch.cat(kind, dim=-1).unsqueeze(1) for kind in zip(*tables, strict=True))
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    rotated = rotate(x, axes_angles(positions, sizes, 1e4), pairs=True)
    assert torch.allclose(rotated, x * cos + turned * sin, atol=1e-6)


def test_a_norm_over_all_heads_is_the_same_when_features_are_summed_in_parts() -> None:
    norm = FeatureRMSNorm(8, 1e-6)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 8)
    whole = norm(x)
    norm.feature_total = nn.Identity()
    assert torch.allclose(norm(x), whole, atol=1e-6)
