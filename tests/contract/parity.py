"""Our models beside those of transformers: the same weights in both, outputs and gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tessera.core.batch import IGNORE, Batch
from tessera.core.outputs import HIDDEN, LOGITS
from tessera.core.spec import ModelSpec
from tessera.ops.loss import linear_cross_entropy
from tests.close import queries_for_keys


def relative(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.detach(), reference.detach()
    return float((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-12))


def numbers(processor: Any, pixels: Tensor) -> Tensor:
    """What bytes of pixels mean, rounded as the reference rounds; and the device's way gives the same to a last bit."""
    patches = processor.pixel_norm
    assert pixels.dtype == torch.uint8
    exact = torch.from_numpy(patches.numbers(pixels.numpy()))
    factor, offset = torch.from_numpy(patches.affine)
    torch.testing.assert_close(torch.addcmul(offset, pixels.float(), factor), exact, rtol=1e-6, atol=1e-6)
    return exact


def from_foreign(spec: ModelSpec, config: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """Our model with weights under foreign names; none may be left over."""
    table = spec.main.weight_map(config)
    pool = {table.canonical(name): tensor for name, tensor in state.items()}
    model = spec.main.build(config)
    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            match = table.rule_for(name)
            assert match is not None, name
            rule, names = match
            parameter.copy_(rule.op.to_native([pool[n] for n in names]))
            used.update(names)
    assert [name for name in pool if name not in used and not table.skips(name)] == []
    return model


def to_foreign(spec: ModelSpec, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names (weights or gradients) as folders name and shape them."""
    return spec.main.weight_map(config).to_foreign(tensors)


def reference_model(config: Any, seed: int, scale: float = 0.2) -> Any:
    """Transformers' model of our configuration, with random weights."""
    hf = config.to_hf()
    model = getattr(transformers, hf["architectures"][0])._from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed, scale)
    return model.train()


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Weights of transformers' model as it would write them: experts one by one."""
    return {name: tensor for name, tensor in spread(dict(model.state_dict())).items() if "inv_freq" not in name}


def spread(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for n, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out |= {f"{stem}{n}.gate_proj.weight": gate, f"{stem}{n}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{n}.down_proj.weight": down for n, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def same_weights(first: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, yours) in zip(first.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, yours), name


def randomize(model: nn.Module, seed: int, scale: float = 0.2) -> None:
    """Weights large enough that every part of a model matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln" in name else 0.0
            parameter.normal_(centre, scale, generator=generator)


def compare_outputs(
    model: nn.Module, batch: Batch, logits: Sequence[Tensor], labels: Sequence[Tensor], tolerance: float
) -> None:
    """Our logits and loss of a packed batch beside theirs, sample by sample; gradients are left in our model, and in
    theirs. `labels`: of each token of each sample. What the batch has beyond the samples is padding."""
    total, count = torch.zeros(()), 0
    for out, wanted in zip(logits, labels, strict=True):
        shifted = torch.cat([wanted[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        count += int((shifted != IGNORE).sum())
    total.backward()
    ours = model(replace(batch, outputs=(HIDDEN,)), logits=True)
    loss, counted = linear_cross_entropy(ours[HIDDEN], model.head.weight, batch["labels"], chunk=16)
    loss.backward()
    expected = torch.cat(list(logits))
    assert counted == count
    assert relative(ours[LOGITS][: len(expected)], expected) < tolerance
    assert relative(loss, total) < tolerance


def compare_gradients(
    spec: ModelSpec,
    config: Any,
    model: nn.Module,
    reference: Mapping[str, Tensor | None],
    tolerance: float,
    beside: Callable[[str], str] = lambda name: name,
) -> None:
    """`reference`: their gradients by names in memory. Encoders that saw nothing have none there, zeros here.
    `beside`: whose size the error is measured by, of gradients that cancel."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in gradients.values()), [
        name for name, grad in gradients.items() if grad is None
    ]
    ours = to_foreign(spec, config, {name: grad for name, grad in gradients.items() if grad is not None})
    canonical = spec.main.weight_map(config).canonical
    theirs = {canonical(name): grad for name, grad in reference.items()}
    assert len(theirs) == len(reference)
    assert sorted(theirs) == sorted(ours)
    sizes = {name: float(g.abs().max().clamp(min=1e-12)) for name, g in theirs.items() if g is not None}
    for name, grad in theirs.items():
        if grad is None:
            assert not ours[name].any(), name
        else:
            assert relative(ours[name], grad) < tolerance * sizes[beside(name)] / sizes[name], name


def queries_for_keys_of_encoders(name: str) -> str:
    """Decoders turn their keys by positions, encoders do not."""
    return queries_for_keys(name) if name.startswith("vision_tower.") else name
