"""Tiny random models with folders of random adapters, and copies of them with an adapter merged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import ModelSpec
from tessera.engine.adapter_bank import AdapterBank
from tessera.lora.export import save_adapters
from tessera.lora.load import merge_into
from tessera.lora.select import Adapter, expert_paths, factor_names, tensor_shapes, weight_names
from tessera.models import resolve
from tessera.weights.map import WeightMap
from tests.toys.chat_set import MODEL
from tests.toys.engine_models import new_tokens

NEW = 8  # tokens of an answer
_MARGIN = 1e-4  # of the largest logit: far above the rounding of fp32, far below usual margins


@dataclass(frozen=True)
class Banked:
    """A model, what a bank needs to know about it, and how adapters for it are written."""

    spec: ModelSpec
    config: Any
    model: Any

    @property
    def plan(self) -> ModelPlan:
        return self.spec.main.plan(self.config)

    @property
    def weight_map(self) -> WeightMap:
        weight_map = self.spec.main.weight_map(self.config)
        assert weight_map is not None
        return weight_map

    def bank(self, **options: Any) -> AdapterBank:
        return AdapterBank(self.model, self.plan, self.weight_map, **options)

    def write(self, folder: Path, layers: Sequence[str], seed: int, rank: int = 4, size: float = 1.0) -> Path:
        """Write a PEFT folder of random adapters for these layers, or for experts. Products are as large as weights
        are, times `size`."""
        tensors = model_tensors(self.model)
        experts = expert_paths(tensors)
        chance = torch.Generator().manual_seed(seed)
        adapters = {path: Adapter(rank, 2.0 * rank, stacked=experts.get(path, ())) for path in layers}
        matrices: dict[str, Tensor] = {}
        for path, adapter in adapters.items():
            weight = tensors[weight_names(path, adapter)[0]]
            for name, shape in tensor_shapes(path, adapter, weight.shape).items():
                scale = 1.0 if name == factor_names(path)[0] else size * float(weight.detach().std()) / (2 * rank**0.5)
                matrices[name] = scale * torch.randn(shape, generator=chance)
        save_adapters(folder, matrices, adapters, self.weight_map, base="base", overwrite=True)
        return folder

    def merged(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Return a copy of the model with an adapter merged in this dtype."""
        model = copy.deepcopy(self.model).to(dtype)
        tensors = model_tensors(model)
        merge_into(folder, 1.0, tensors, list(tensors), self.weight_map)
        return model


def build(family: str, preset: str, config: dict[str, Any]) -> Banked:
    """Return a model of a family with random weights, whose logits tell tokens apart."""
    spec, settings = resolve(ModelSection.model_validate({"family": family, "preset": preset, "config": config}))
    model: Any = spec.main.build(settings).eval()
    chance = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, chance)
        if not path.endswith("norm.weight"):
            parameter.data.mul_(2)
    return Banked(spec, settings, model)


@functools.cache
def vision_language() -> Banked:
    return build("qwen2_vl", "quickstart", {**MODEL, "text": {**MODEL["text"], "initializer_range": 0.15}})


@functools.cache
def mixture() -> Banked:
    return build(
        "qwen3", "quickstart-moe", {"text": {"hidden_size": 64, "num_hidden_layers": 2}, "tie_word_embeddings": False}
    )


def linear_layers(model: nn.Module, within: str) -> list[str]:
    """Return the plain linear layers of a part of the model."""
    paths = (path for path, part in model.named_modules() if type(part) is nn.Linear)
    return [path for path in paths if path.startswith(within)]


def text_rows(banked: Banked, lengths: Sequence[int], seed: int) -> Batch:
    """Return one packed call of random prompts."""
    chance = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(length) for length in lengths])
    if banked.spec.name != "qwen3":
        positions = positions.expand(3, -1)
    tokens = torch.randint(0, banked.config.text.vocab_size, (sum(lengths),), generator=chance)
    return Batch({"tokens": tokens, "positions": positions}, {"text": Segments.of(list(lengths))})


def prompt(banked: Banked, seed: int, image: bool = False) -> Batch:
    """Return the family's example with random tokens, and with random pixels if it has an image."""
    assert banked.spec.example is not None
    chance = torch.Generator().manual_seed(seed)
    length = 12 + seed % 5
    if not image:
        positions = torch.arange(length)
        positions = positions if banked.spec.name == "qwen3" else positions.expand(3, -1)
        return Batch(
            {"tokens": torch.randint(0, 60, (length,), generator=chance), "positions": positions},
            {"text": Segments.of([length])},
        )
    batch = banked.spec.example(banked.config, 24)
    tensors = {name: value for name, value in batch.tensors.items() if name != "labels"}
    tensors["pixels"] = torch.randn(tensors["pixels"].shape, generator=chance)
    tensors["tokens"] = torch.randint(0, 60, batch["tokens"].shape, generator=chance)
    return Batch(tensors, batch.segments)


def alone(model: Any, batch: Batch) -> tuple[list[int], int]:
    """Return the tokens of one request, and how many of them no rounding can change."""
    (tokens,) = new_tokens(model, batch, NEW)
    length, following = batch["tokens"].numel(), int(batch["positions"][..., -1].max()) + 1
    after = torch.arange(following, following + NEW - 1).expand(*batch["positions"].shape[:-1], -1)
    tensors = {
        **batch.tensors,
        "tokens": torch.cat([batch["tokens"], torch.tensor(tokens[:-1])]),
        "positions": torch.cat([batch["positions"], after], dim=-1),
    }
    segments = {**batch.segments, "text": Segments.of([length + NEW - 1])}
    with torch.no_grad():
        logits: Tensor = model(Batch(tensors, segments), logits=True)["logits"][length - 1 :]
    best = logits.topk(2).values
    certain = best[:, 0] - best[:, 1] > _MARGIN * logits.abs().max()
    return tokens, int(certain.long().cumprod(0).sum())
