"""The torch DCP folders of jobs with FSDP2, whose experts have other names and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.checkpoint.forms import StoredForm, native_shapes
from tessera.checkpoint.legacy.forms import name_prefix
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.models import build_on_meta, resolve
from tessera.weights.file_plan import PlannedTensor
from tessera_compat.shards.dcp_folder import JobFolder


class InMemory(StoredForm):
    """A form whose tensors are in memory."""

    where = "memory"

    def __init__(self, stored: dict[str, torch.Tensor]) -> None:
        self.stored = stored

    def tensors(self) -> dict[str, PlannedTensor]:
        return {name: PlannedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.stored.items()}

    def read(self, name: str, offsets: Any = None, sizes: Any = None) -> torch.Tensor:
        if sizes is None:
            return self.stored[name]
        ends = [first + size for first, size in zip(offsets, sizes, strict=True)]
        return self.stored[name][tuple(slice(a, b) for a, b in zip(offsets, ends, strict=True))]


@pytest.mark.parametrize("prefix", ["", "model.", "model.model.", "model.base_model.model.model."])
@pytest.mark.parametrize(("family", "merged"), [("qwen3_vl", False), ("qwen3", True)])
def test_tensors_of_a_job_are_found_behind_its_prefixes(prefix: str, family: str, merged: bool) -> None:
    """Stacked experts have lost a dimension, or those of a layer are one; an optimizer is stored beside the model."""
    spec, config = resolve(ModelSection(family=family, preset="quickstart-moe"))
    module, table = build_on_meta(spec, config), spec.main.weight_map(config)
    assert table is not None
    native = {name: torch.randn(tensor.shape) for name, tensor in model_tensors(module).items()}
    published = table.to_foreign(native)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in published.items():
        if ".experts." not in name:
            stored[prefix + name] = tensor
        elif not merged:
            stored[prefix + name] = tensor.reshape(-1, tensor.shape[-1])
    layers = [name.removesuffix(".0.down_proj.weight") for name in published if name.endswith(".0.down_proj.weight")]
    for at in layers:
        count = sum(name.startswith(at) and name.endswith("down_proj.weight") for name in published)
        gates = [
            torch.cat([published[f"{at}.{n}.{kind}_proj.weight"] for kind in ("gate", "up")]) for n in range(count)
        ]
        downs = [published[f"{at}.{n}.down_proj.weight"] for n in range(count)]
        stored[f"{prefix}{at}.gate_up_proj"] = torch.cat([gate.t() for gate in gates])
        stored[f"{prefix}{at}.down_proj"] = torch.stack([down.t() for down in downs])
    assert bool(layers) == merged
    form = InMemory({**stored, **({"optimizer.state.model.exp_avg": torch.zeros(2)} if prefix else {})})
    shapes = native_shapes(native)
    assert name_prefix(form.tensors(), table, shapes) == prefix
    form.stored = {name.removeprefix(prefix): it for name, it in form.stored.items() if name.startswith(prefix)}
    job = JobFolder(form, table, shapes)
    assert job.tensors().keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(job.read(name), tensor), name
        if tensor.dim() > 1:  # what one of several ranks reads
            offsets, sizes = [1, *[0] * (tensor.dim() - 1)], [1, *tensor.shape[1:]]
            assert torch.equal(job.read(name, offsets, sizes), tensor[1:2]), name
