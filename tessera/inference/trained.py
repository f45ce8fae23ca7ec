"""Open a run, a checkpoint or adapters to read the trained model tensor by tensor, without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from tessera.checkpoint.forms import native_shapes
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.reader import Section
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError
from tessera.inference.load import FoundModel, float32_names
from tessera.inference.weight_source import find_file
from tessera.lora.merged_form import TrainedForm
from tessera.lora.modules import find_adapters
from tessera.lora.reading import part_of, settled, targets_origin
from tessera.lora.select import Adapter
from tessera.models import for_family


def open_trained(path: Path, found: FoundModel, spec: ModelSpec, config: Section, module: nn.Module) -> TrainedForm:
    """Open what `found` describes. `module`: the model on the meta device, without adapters."""
    lora, hub, tensors = found.section.lora, spec.main.weight_map(config), model_tensors(module)
    if lora is not None and lora.quantize is not None:
        raise TesseraError(
            "the weights of adapted layers are kept in fewer bits, which is not what adapters are merged into",
            where=str(path),
            fix=f"tessera convert {path} ADAPTERS --adapters; then convert the folder ADAPTERS",
        )
    adapters: Mapping[str, Adapter] = {}
    if lora is not None:
        where = targets_origin(lora)
        with for_family(spec):
            lora = settled(lora, list(tensors), hub, part_of(found.section.path))
        adapters = find_adapters(lora, module, spec.main.plan(config), where)
    if found.origin == "run":
        newest = CheckpointManager(find_file(path, "checkpoints"), keep=1).latest()
        if newest is None:
            raise TesseraError("this run has no checkpoint yet", where=str(path))
        path = newest
    base, wide = found.section.path, float32_names(module, spec.main.plan(config).float32)
    return TrainedForm(path, native_shapes(tensors), tied_names(module), hub, adapters, found.dtype, base, wide)
