"""Our models beside those of transformers: the same weights in both, outputs and gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.types import ModelSpec


def relative(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.detach(), reference.detach()
    return float((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-12))


def numbers(processor: Any, pixels: Tensor) -> Tensor:
    """What bytes of pixels mean, rounded as the reference rounds; and the device's way gives the same to a last bit."""
    patches = processor.bytes_mean
    assert pixels.dtype == torch.uint8
    exact = torch.from_numpy(patches.numbers(pixels.numpy()))
    factor, offset = torch.from_numpy(patches.affine)
    torch.testing.assert_close(torch.addcmul(offset, pixels.float(), factor), exact, rtol=1e-6, atol=1e-6)
    return exact


def from_foreign(spec: ModelSpec, config: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """Our model with weights under foreign names; none may be left over."""
    assert spec.weights is not None
    table = spec.weights(config)
    pool = {table.canonical(name): tensor for name, tensor in state.items()}
    model = spec.build(config)
    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = table.to_foreign(name)
            assert found is not None, name
            rule, names = found
            parameter.copy_(rule.op.to_ours([pool[n] for n in names]))
            used.update(names)
    assert [name for name in pool if name not in used and not table.skips(name)] == []
    return model


def to_foreign(spec: ModelSpec, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names (weights or gradients) as folders name and shape them."""
    assert spec.weights is not None
    return spec.weights(config).theirs(tensors)


def randomize(model: nn.Module, seed: int, scale: float = 0.2) -> None:
    """Weights large enough that every part of a model matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln" in name else 0.0
            parameter.normal_(centre, scale, generator=generator)


def compare_gradients(
    spec: ModelSpec,
    config: Any,
    model: nn.Module,
    reference: Mapping[str, Tensor | None],
    tolerance: float,
    canonical: Callable[[str], str] = lambda name: name,
    beside: Callable[[str], str] = lambda name: name,
) -> None:
    """`reference`: their gradients by the names of folders. Towers that saw nothing have none there, zeros here.
    `beside`: whose size the error is measured by, of gradients that cancel: the bias of keys moves nothing where
    positions do not turn them."""
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in own.values()), [name for name, grad in own.items() if grad is None]
    ours = to_foreign(spec, config, {name: grad for name, grad in own.items() if grad is not None})
    names = [canonical(name) for name in reference]
    assert sorted(names) == sorted(ours)
    sizes = {
        n: float(g.abs().max().clamp(min=1e-12))
        for n, g in zip(names, reference.values(), strict=True)
        if g is not None
    }
    for name, grad in zip(names, reference.values(), strict=True):
        if grad is None:
            assert not ours[name].any(), name
        else:
            size = sizes[beside(name)] / sizes[name]
            assert relative(ours[name], grad) < tolerance * size, name
