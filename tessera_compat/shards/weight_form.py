"""Add the format `mm` to `tessera convert` and `model.weights`: one weight file per rank, as Megatron jobs write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.forms import StoredForm
from tessera.checkpoint.legacy.dcp import METADATA
from tessera.checkpoint.weight_forms import ModelForm, WeightForm
from tessera.checkpoint.weights import check_copy
from tessera.config.run_config import ModelSection
from tessera.weights.file_plan import FolderPlan, PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows
from tessera_compat.shards import omni, video, vision
from tessera_compat.shards.dcp_folder import JobFolder
from tessera_compat.shards.files import (
    LATEST,
    MegatronTensor,
    is_megatron_folder,
    newest_iteration,
    plan_megatron,
    read_megatron,
)
from tessera_compat.shards.form import MegatronForm
from tessera_compat.shards.layout import MegatronLayout, Recipe, layout_of_recipe, parse_layout

FAMILIES: Mapping[str, Callable[[Any], MegatronForm]] = {
    "qwen2_vl": vision.qwen2_vl,
    "qwen2_5_vl": vision.qwen2_5_vl,
    "qwen3_vl": vision.qwen3_vl,
    "internvl": vision.internvl,
    "qwen2_5_omni": omni.qwen2_5_omni,
    "wan": video.wan,
    "cogvideox": video.cogvideox,
    "hunyuan_video": video.hunyuan_video,
}


class MegatronFolder(StoredForm):
    """Read full tensors from the rank files of a Megatron-style job."""

    def __init__(self, folder: Path, form: MegatronForm, layout: MegatronLayout | None = None) -> None:
        self.where = str(folder)
        self.weight_map = form.weights
        self._tensors, self.layout = read_megatron(folder, form, layout)
        self._tables: dict[str, MegatronTensor] = {}  # embedding and its copy on the last stage of a tied model
        if form.tied and form.table in self._tensors and form.head in self._tensors:
            self._tables = {form.head: self._tensors.pop(form.head), form.table: self._tensors[form.table]}

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def check_copies(self, weight_map: WeightMap) -> None:
        if self._tables:
            head, table = self._tables
            shapes = {name: tensor.shape for name, tensor in self._tables.items()}
            check_copy(head, table, shapes, lambda name, *box: self._tables[name].read(*box), self.where)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._tensors[name].read(offsets, sizes)

    def read_rows(self, name: str) -> TensorRows:
        return self._tensors[name].read_rows()


@dataclass(frozen=True)
class _ModelShards(ModelForm):
    """Read and write the rank files of a model whose sizes are known."""

    form: MegatronForm
    weights: WeightMap

    def open(self, folder: Path, layout: MegatronLayout | None = None) -> StoredForm:
        return MegatronFolder(folder, self.form, layout)

    def plan(self, tensors: Mapping[str, PlannedTensor], layout: MegatronLayout, where: str) -> FolderPlan:
        return plan_megatron(self.form, layout, tensors, where)

    def layout_of(self, recipe: Recipe, model: ModelSection) -> MegatronLayout:
        return layout_of_recipe(recipe, model, self.form)


class _Shards(WeightForm):
    """Recognize folders of Megatron-style jobs by the file that names their newest iteration."""

    description = f"Megatron-style shards ({LATEST})"

    def detect(self, folder: Path) -> bool:
        return is_megatron_folder(folder)

    def parse_layout(self, layout: Mapping[str, Any]) -> MegatronLayout:
        return parse_layout(layout)

    def of_model(self, family: str, config: Any) -> ModelForm | None:
        if family not in FAMILIES:
            return None
        form = FAMILIES[family](config)
        return _ModelShards(form, form.weights)

    def adapt_dcp(self, stored: StoredForm, weights: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm:
        """Return a reader of a DCP folder by Hugging Face names. Jobs with FSDP2 can flatten or merge the experts."""
        return JobFolder(stored, weights, shapes)

    def weights_folder(self, folder: Path) -> Path:
        """Return the folder of the newest iteration if it is a DCP folder, which jobs with FSDP2 write."""
        inner = newest_iteration(folder)
        return inner if (inner / METADATA).is_file() and not inner.is_symlink() else folder


SHARDS = _Shards()
