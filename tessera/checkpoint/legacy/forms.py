"""Load weights from folders of torch.distributed.checkpoint (DCP), and from formats that other packages add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tessera.checkpoint.forms import StoredForm
from tessera.checkpoint.legacy.dcp import METADATA, read_dcp
from tessera.checkpoint.weight_forms import adapted_dcp, described_forms, detect_form, weight_form, weights_folder
from tessera.config.reader import Section
from tessera.errors import TesseraError
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.layouts import no_such_folder
from tessera.weights.map import WeightMap


class DcpFolder(StoredForm):
    """Read a folder of torch.distributed.checkpoint: tensors whose names begin with `prefix`, which is removed."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.where = str(folder)
        check_dcp(folder)
        stored = read_dcp(folder)
        self._tensors = {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}
        if not self._tensors:
            raise TesseraError(
                f"no tensor name begins with {prefix!r}",
                where=self.where,
                allowed=[*stored][:10],
                code="checkpoint.unknown-name-prefix",
            )

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._tensors[name].read(offsets, sizes)


# ---------------------------------------------------------------------------------------------- opening


def check_dcp(folder: Path, other: Sequence[str] = ()) -> None:
    """Raise unless a folder is a torch DCP folder. `other`: descriptions of other supported formats, for the error."""
    if not folder.is_dir():
        raise no_such_folder(folder, "model.weights" if other else None)
    if not (folder / METADATA).is_file():
        raise TesseraError(
            f"the folder is not a torch DCP folder: it has no {METADATA}",
            where=str(folder),
            allowed=[*other] or None,
            fix="set model.path to a Hugging Face folder, a run or a checkpoint, and leave out model.weights"
            if other
            else None,
            code="checkpoint.not-dcp-folder",
        )


def open_form(
    folder: Path, family: str, config: Section, weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> StoredForm:
    """Open the weights of a configured model: a torch DCP folder, or a format that another package adds.

    `shapes`: shapes of all tensors of the model.
    """
    folder = weights_folder(folder)
    name = detect_form(folder)
    if (form := weight_form(name)) is not None:
        model = form.of_model(family, config)
        if model is None:
            raise TesseraError(
                f"the format {name} does not support the family {family}",
                where=str(folder),
                code="weights.form-without-family",
            )
        return model.open(folder)
    check_dcp(folder, described_forms())
    stored = DcpFolder(folder)
    prefix = name_prefix(stored.tensors(), weight_map, shapes)
    return adapted_dcp(DcpFolder(folder, prefix) if prefix else stored, weight_map, shapes)


def name_prefix(
    stored: Mapping[str, PlannedTensor], weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the name prefix that most of the model's tensors have in the folder. Optimizer tensors do not count."""
    tables = [weight_map, *weight_map.others.values()]
    matches = [match for table in tables for native in shapes if (match := table.rule_for(native))]
    names = {name for _, foreign in matches for name in foreign}
    counts: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for at in range(len(parts)):
            end = ".".join(parts[at:])
            if any(table.canonical(end) in names for table in tables):
                counts[name[: len(name) - len(end)]] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")
