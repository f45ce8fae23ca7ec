"""A run can begin from shards of a Megatron-style job, or from a torch DCP folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.checkpoint.forms import StoredForm, native_shapes
from tessera.checkpoint.legacy.forms import job_tensors
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.models import build_on_meta, resolve
from tessera.weights.file_plan import PlannedTensor
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Data, a Hugging Face folder with its tokenizer, and a recipe that starts from it."""
    root = tmp_path_factory.mktemp("begun")
    data = write_chat_set(root / "data")
    recipe = chat_recipe(data, root / "first", steps=1)
    recipe["checkpoint"] = {"every": 0, "export": True, "prove": "never"}
    run = tessera.train(recipe)
    return data, run.folder / "hf", {**recipe, "model": {"path": str(run.folder / "hf")}}


def losses(recipe: dict[str, Any], out: Path, **model: Any) -> list[float]:
    changed = {**recipe, "out": str(out), "model": {**recipe["model"], **model}}
    return [row["loss"] for row in tessera.train(changed).metrics if row["kind"] == "train"]


@pytest.mark.parametrize(("to", "layout"), [("mm", {"tp": 2}), ("dcp", None)])
def test_a_run_begins_from_another_form_as_from_the_folder(
    begun: tuple[Path, Path, dict[str, Any]], to: Any, layout: Any, tmp_path: Path
) -> None:
    _, folder, recipe = begun
    other = tessera.convert(folder, tmp_path / "other", to=to, layout=layout)
    assert losses(recipe, tmp_path / "a") == losses(recipe, tmp_path / "b", weights=str(other))


def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    begun: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, folder, recipe = begun
    other = tessera.convert(folder, tmp_path / "other", to="mm", layout={})
    with raises("weights.shape-mismatch"):
        losses(recipe, tmp_path / "a", weights=str(other), config={"text.intermediate_size": 200})
    with raises("checkpoint.not-dcp-folder"):
        losses(recipe, tmp_path / "b", weights=str(folder))
    with raises("weights.folder-missing"):
        losses(recipe, tmp_path / "c", weights=str(tmp_path / "nowhere"))
    without = {key: value for key, value in recipe.items() if key != "model"}
    with raises("recipe.wrong-value"):
        tessera.train({**without, "model": {"family": "qwen2_vl", "preset": "quickstart", "weights": str(other)}})


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
    job = job_tensors(form.tensors(), table, native_shapes(native))
    assert job.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(job[name].read(form, None, None), tensor), name
        if tensor.dim() > 1:  # what one of several ranks reads
            offsets, sizes = [1, *[0] * (tensor.dim() - 1)], [1, *tensor.shape[1:]]
            assert torch.equal(job[name].read(form, offsets, sizes), tensor[1:2]), name
