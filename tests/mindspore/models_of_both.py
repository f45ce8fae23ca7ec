"""Tiny models and batches for comparisons of MindSpore with torch."""

from __future__ import annotations

from typing import Any

import torch
from language_cases import text
from torch import nn

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.lora.modules import add_adapters
from tessera.lora.select import Adapter
from tessera.mindspore.build import prepare_process
from tessera.mindspore.engine import MindSporeEngine
from tessera.mindspore.functions import to_torch
from tessera.mindspore.model import Network
from tessera.mindspore.optimizer import MindSporeAdamW
from tessera.mindspore.state import DeviceState
from tessera.models import FAMILIES, build_on_meta
from tessera.parallel.engine import SimpleEngine
from tessera.tasks.language import LanguageTask

TEXTS: dict[str, dict[str, Any]] = {
    "llama": text(2, 4, 2, 8, rope_scaling={"rope_type": "llama3", "factor": 8.0}, sandwich_norm=True),
    "qwen2": text(3, 4, 1, 8, attention_bias=True),
    "qwen3": text(2, 4, 2, 12, qk_norm=True, head_dim=12, partial_rotary_factor=0.5),
}
VISION = {
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
NAMES = (*TEXTS, "qwen2_vl")


def model_of(family: str, dtype: torch.dtype, tied: bool = False, lora: bool = False) -> nn.Module:
    """Return a model with weights that leave no gradient small."""
    spec = FAMILIES.get(family)
    fields: dict[str, Any] = {"tie_word_embeddings": tied}
    if family == "qwen2_vl":
        decoder = text(2, 4, 2, 8, attention_bias=True, mrope_section=(1, 1, 2))
        fields |= {"text": decoder, "vision": VISION, "image_token_id": 78, "video_token_id": 79}
        fields |= {"vision_start_token_id": 76, "vision_end_token_id": 77}
    else:
        fields |= {"text": TEXTS[family]}
    module = build_on_meta(spec, spec.config.model_validate(fields))
    if lora:
        layers = {name: Adapter(3, 5.0) for name, part in module.named_modules() if name.endswith((".q", ".down"))}
        add_adapters(module, layers)
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
    return module.to(dtype)


def batch_of(family: str, seed: int, lengths: tuple[int, ...] = (9, 14)) -> Batch:
    """Return a packed batch; for a vision family with an image in the first sample."""
    generator, total = torch.Generator().manual_seed(seed), sum(lengths)
    tokens = torch.randint(2, 70, (total,), generator=generator)
    labels = torch.randint(2, 70, (total,), generator=generator)
    labels[torch.rand(total, generator=generator) < 0.4] = IGNORE
    positions = torch.cat([torch.arange(length) for length in lengths])
    tensors = {"tokens": tokens, "labels": labels, "positions": positions}
    tensors["trained"] = torch.nonzero(labels != IGNORE).flatten()
    segments = {"text": Segments.of(lengths)}
    if family == "qwen2_vl":
        tensors["positions"] = torch.stack([positions, positions.flip(0) % 7, positions % 5])
        tensors["pixels"] = torch.randn(8 + 16, 3 * 2 * 16, generator=generator)
        tensors["patch_positions"] = torch.randint(0, 6, (24, 2), generator=generator)
        tensors["media_slots"] = torch.tensor([1, 2, 4, 5, 6, 11])
        segments["vision"] = Segments.of([8, 16])
    return Batch(tensors, segments)


def mindspore_of(module: nn.Module) -> tuple[MindSporeEngine, DeviceState, MindSporeAdamW]:
    """Return an engine that holds the weights of a torch model, its state, and an optimizer."""
    prepare_process(1)
    state = DeviceState(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    group = {"params": [p for _, p in named], "names": [name for name, _ in named], "lr": 1e-2, "weight_decay": 0.1}
    optimizer = MindSporeAdamW([group], (0.9, 0.95), 1e-8, state)
    engine = MindSporeEngine(Network(module), state)
    engine.settle(optimizer)
    return engine, state, optimizer


def torch_results(module: nn.Module, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Return loss and gradients of torch, by name."""
    module.zero_grad()
    totals = SimpleEngine(module).step(LanguageTask(), [of_type(batch, module) for batch in batches])
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": totals.loss().to(next(module.parameters()).dtype), **gradients}


def mindspore_results(module: nn.Module, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Return loss and gradients of MindSpore, by name."""
    engine, state, _ = mindspore_of(module)
    totals = engine.step(LanguageTask(), batches)
    return {"loss": totals.loss().to(state.dtype), **{name: to_torch(g) for name, g in state.gradients.items()}}


def of_type(batch: Batch, module: nn.Module) -> Batch:
    dtype = next(module.parameters()).dtype
    return batch.with_tensors(**{name: t.to(dtype) for name, t in batch.tensors.items() if t.is_floating_point()})
