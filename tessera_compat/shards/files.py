"""Read and write the folders of Megatron-style jobs: one file per tensor, pipeline and expert rank.

    latest_checkpointed_iteration.txt
    release/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt      (or iter_0000300/...)

A `MegatronForm` describes the names and splits of tensors, a `MegatronLayout` the numbers of ranks. Tensors are read
one at a time and written in any order; nothing is unpickled.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.legacy.torch_files import StoredTensor, read_torch_file
from tessera.checkpoint.legacy.torch_plan import plan_torch_file
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import check_inside
from tessera.weights.file_plan import FilePlan, FolderPlan, Place, PlannedTensor
from tessera.weights.rows import TensorRows
from tessera_compat.shards.form import LOCAL_EXPERT, MegatronForm, PipelinePart
from tessera_compat.shards.layout import MegatronLayout, check_layout

LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_VERSION = 3.0
# Prefixes of class names in rank files. Objects of these classes are never created.
CLASSES = ("megatron.core.", "megatron.training.", "mindspeed.", "mindspeed_mm.")


# ---------------------------------------------------------------------------------------------- places of tensors


@dataclass(frozen=True)
class _Slot:
    """Identify the rank files that store a tensor: pipeline stage, expert rank (None: all expert ranks), name in the
    file.
    """

    stage: int
    expert_rank: int | None
    name: str


def _slot(form: MegatronForm, layout: MegatronLayout, name: str, where: str) -> _Slot:
    part = form.part_of(name)
    if part is None:
        raise TesseraError(
            f"this model has no encoder or decoder with the tensor {name}",
            where=where,
            code="weights.unknown-tensor",
        )
    stages = layout.stages(part)
    used = [stage for stage, count in enumerate(stages) if count]
    if not name.startswith(part.layers):
        return _Slot(used[0] if name.startswith(part.first) else used[-1], None, name)
    number, _, rest = name.removeprefix(part.layers).partition(".")
    stage, before = 0, 0
    while int(number) >= before + stages[stage]:
        before += stages[stage]
        stage += 1
    local = f"{part.layers}{int(number) - before}.{rest}"
    expert = LOCAL_EXPERT.fullmatch(local)
    if expert is None:
        return _Slot(stage, None, local)
    each = form.experts // layout.ep
    index = int(expert[2])
    return _Slot(stage, index // each, f"{expert[1]}{index % each}{expert[3]}")


def _rank_folder(layout: MegatronLayout, tp: int, pp: int, ep: int) -> str:
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if layout.pp > 1 else ""
    return name + (f"_{ep:03d}" if layout.ep > 1 else "")


# ---------------------------------------------------------------------------------------------- writing


def plan_megatron(
    form: MegatronForm, layout: MegatronLayout, tensors: Mapping[str, PlannedTensor], where: str
) -> FolderPlan:
    """Plan the rank files of a folder for Megatron-style jobs. `tensors`: full tensors by Megatron names."""
    check_layout(form, layout, where)
    stages: list[list[tuple[str, _Slot]]] = [[] for _ in range(layout.pp * layout.virtual)]
    for name in tensors:
        slot = _slot(form, layout, name, where)
        stages[slot.stage].append((name, slot))
    if form.tied and layout.pp > 1:
        last = _slot(form, layout, form.head, where).stage
        stages[last].append((form.table, _Slot(last, None, form.head)))
    files = {LATEST: FilePlan.of_bytes(b"release")}
    places: dict[str, list[Place]] = {name: [] for name in tensors}
    shapes = {name: _slice_plans(form, layout, name, plan) for name, plan in tensors.items()}
    for pp, tp, ep in itertools.product(range(layout.pp), range(layout.tp), range(layout.ep)):
        content: dict[str, Any] = {}
        held: list[str] = []
        for virtual in range(layout.virtual):
            here = [entry for entry in stages[virtual * layout.pp + pp] if entry[1].expert_rank in (None, ep)]
            key = "model" if layout.virtual == 1 else f"model{virtual}"
            content[key] = {slot.name: shapes[name][tp] for name, slot in here}
            held += [name for name, _ in here]
        planned = plan_torch_file(content | {"checkpoint_version": _VERSION})
        file = f"release/{_rank_folder(layout, tp, pp, ep)}/{FILE}"
        files[file] = FilePlan(planned.end, planned.pieces)
        for name, stored in zip(held, planned.tensors, strict=True):
            places[name].append(Place(file, stored.offset, tp, stored.checksums))

    def divide(name: str, tensor: TensorRows) -> Sequence[TensorRows]:
        split = form.split_of(name)
        return [tensor] * layout.tp if split is None else split.divide(tensor, layout.tp)

    return FolderPlan(files, places, divide)


def _slice_plans(form: MegatronForm, layout: MegatronLayout, name: str, plan: PlannedTensor) -> list[PlannedTensor]:
    split = form.split_of(name)
    if split is None:
        return [plan] * layout.tp
    blank = torch.empty(plan.shape, dtype=plan.dtype, device="meta")
    return [PlannedTensor(plan.dtype, part.shape) for part in split.divide(TensorRows.of(blank), layout.tp)]


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class MegatronTensor:
    """Read a full tensor from its slices, one slice for each tensor rank."""

    name: str
    slices: tuple[StoredTensor, ...]
    form: MegatronForm

    @property
    def dtype(self) -> torch.dtype:
        return self.slices[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        blanks = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in self.slices]
        return tuple(self._join(blanks).shape)

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the full tensor, or a box of it. Only slices that intersect the box are read."""
        split = self.form.split_of(self.name)
        if split is None or len(self.slices) == 1:
            return self.slices[0].read(offsets, sizes)
        sizes = self.shape if sizes is None else sizes
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=self.dtype)
        boxes = split.boxes(offsets or [0] * len(sizes), sizes, [part.shape for part in self.slices])
        return split.join_boxes([self.slices[rank].read(start, size) for rank, start, size in boxes])

    def read_rows(self) -> TensorRows:
        """Return the full tensor as blocks of rows. They are memory-mapped; a tensor split by columns is copied."""
        split = self.form.split_of(self.name)
        if split is None or len(self.slices) == 1 or 0 in self.shape:
            return TensorRows.of(self.read())
        boxes = split.boxes([0] * len(self.shape), self.shape, [part.shape for part in self.slices])
        return split.join_rows([self.slices[rank].read(start, size) for rank, start, size in boxes])

    def _join(self, slices: list[Tensor]) -> Tensor:
        split = self.form.split_of(self.name)
        if len({(part.dim(), part.dtype) for part in slices}) > 1:
            raise TesseraError(
                f"{self.name} has different dtypes or numbers of axes on the tensor ranks",
                where=str(self.slices[0].file),
                code="megatron.slices-differ",
            )
        if split is None or len(slices) == 1:
            return slices[0]
        try:
            return split.join(slices)
        except (RuntimeError, IndexError, ValueError) as error:
            raise TesseraError(
                f"the slices of {self.name} cannot be joined: {first_line(error)}",
                where=str(self.slices[0].file),
                code="megatron.slices-differ",
            ) from None


def is_megatron_folder(folder: Path) -> bool:
    """Return whether a folder contains rank files of a Megatron-style job, and is not a run of Tessera."""
    return (folder / LATEST).is_file() and not (folder / "config.yaml").is_file()


def read_megatron(
    folder: Path, form: MegatronForm, layout: MegatronLayout | None = None, *, some_layers: bool = False
) -> tuple[dict[str, MegatronTensor], MegatronLayout]:
    """Return the full tensors of a folder by Megatron names, and the layout of its files.

    The layout is read from the files. `layout`: the expected layout; raise if it differs. `some_layers`: the files
    contain adapters of some layers only, so the number of layers per stage is taken from `layout`.
    """
    files = _rank_files(folder)
    iterations: dict[Any, Path] = {}
    contents = {rank: _models(path, iterations) for rank, path in files.items()}
    if len(iterations) > 1:
        numbers = ", ".join(f"{path.parent.name} of iteration {number}" for number, path in iterations.items())
        raise TesseraError(
            f"the rank files belong to different iterations: {numbers}",
            where=str(folder),
            code="megatron.mixed-iterations",
        )
    if (
        form.experts
        and not any(third for _, _, third in contents)
        and all(form.table in models[0] for models in contents.values())
    ):
        # NNN in `mp_rank_TT_NNN` is a pipeline rank or an expert rank. Here every file has the embedding table. Only
        # one pipeline rank stores that table, so NNN is the expert rank.
        contents = {(tp, 0, ep): models for (tp, ep, _), models in contents.items()}
    stored = _layout_of(form.parts, contents)
    if some_layers and layout is not None and (layout.pp, layout.virtual) == (stored.pp, stored.virtual):
        stored = replace(stored, layers=layout.layers)
    check_layout(form, stored, str(folder))
    if layout is not None and not _same(form, layout, stored):
        what = f"its files are divided as {_layout_text(stored)}, not as {_layout_text(layout)}"
        raise TesseraError(what, where=str(folder), code="megatron.other-layout")
    tensors: dict[str, MegatronTensor] = {}
    for pp in range(stored.pp):
        for ep in range(stored.ep):
            shards = [contents[tp, pp, ep] for tp in range(stored.tp)]
            for chunk, names in enumerate(shards[0]):
                stage = chunk * stored.pp + pp
                for local in names:
                    slices = tuple(_slice(shard, chunk, local, folder) for shard in shards)
                    name = _global_name(form, stored, stage, ep, local)
                    tensors.setdefault(name, MegatronTensor(name, slices, form))
    return tensors, stored


def _same(form: MegatronForm, expected: MegatronLayout, stored: MegatronLayout) -> bool:
    sizes = [(layout.tp, layout.ep, layout.pp, layout.virtual) for layout in (expected, stored)]
    return sizes[0] == sizes[1] and all(expected.stages(part) == stored.stages(part) for part in form.parts)


def _slice(shard: list[dict[str, StoredTensor]], chunk: int, name: str, folder: Path) -> StoredTensor:
    if chunk >= len(shard) or name not in shard[chunk]:
        raise TesseraError(
            f"the files of some tensor parallel ranks lack the tensor {name}",
            where=str(folder),
            code="megatron.slice-missing",
        )
    return shard[chunk][name]


def newest_iteration(folder: Path) -> Path:
    """Return the folder of the newest iteration, or `release` for weights without an iteration."""
    try:
        with open(folder / LATEST, encoding="utf-8") as opened:
            newest = opened.read(100).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(
            f"{LATEST} cannot be read: {first_line(error)}", where=str(folder), code="megatron.latest-iteration"
        ) from None
    if newest != "release" and not (newest.isdecimal() and len(newest) < 20):
        raise TesseraError(
            f"{LATEST} contains {newest[:40]!r}, which is neither release nor an iteration",
            where=str(folder),
            code="megatron.latest-iteration",
        )
    inner = folder / (newest if newest == "release" else f"iter_{int(newest):07d}")
    if not inner.is_dir():
        raise TesseraError(
            f"the folder {inner.name}, which {LATEST} names, is missing",
            where=str(folder),
            code="megatron.iteration-missing",
        )
    return inner


def _rank_files(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return the files of the newest iteration by (tensor, pipeline, expert) rank."""
    inner = newest_iteration(folder)
    named = [(match, path) for path in sorted(inner.iterdir()) if (match := _RANK.fullmatch(path.name))]
    if not named:
        raise TesseraError("the folder has no mp_rank_* folder", where=str(inner), code="megatron.no-rank-files")
    files = {}
    for match, path in named:
        second, third = (int(number) if number else 0 for number in match.groups()[1:])
        check_inside(path / FILE, folder)
        files[int(match[1]), second, third] = path / FILE
    ranks = [sorted({key[axis] for key in files}) for axis in range(3)]
    expected = [(tp, pp, ep) for tp in ranks[0] for pp in ranks[1] for ep in ranks[2]]
    missing = [key for key in expected if key not in files]
    if missing or any(numbers != list(range(len(numbers))) for numbers in ranks):
        raise TesseraError(
            f"rank files are missing: {missing or ranks}", where=str(inner), code="megatron.rank-files-missing"
        )
    return files


def _models(path: Path, iterations: dict[Any, Path]) -> list[dict[str, StoredTensor]]:
    """Read the tensors of a rank file, per virtual stage. Add its iteration to `iterations`."""
    content = read_torch_file(path, CLASSES)
    if not isinstance(content, dict):
        raise TesseraError(
            "the file contains no dictionary with a model", where=str(path), code="weights.no-model-in-file"
        )
    if isinstance(number := content.get("iteration"), int):
        iterations.setdefault(number, path)
    chunks = [content["model"]] if "model" in content else []
    while f"model{len(chunks)}" in content:
        chunks.append(content[f"model{len(chunks)}"])
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise TesseraError(
            "the file contains no model",
            where=str(path),
            fix="pass a checkpoint with the key `model` or `model0`",
            code="weights.no-model-in-file",
        )
    return [dict(_tensors(chunk, path)) for chunk in chunks]


def _tensors(chunk: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, StoredTensor]]:
    for name, value in chunk.items():
        if isinstance(value, StoredTensor):
            yield str(name), value
        elif value is not None and not str(name).endswith("_extra_state"):  # state of Transformer Engine, not a weight
            raise TesseraError(
                f"the entry {name} of the model is not a tensor", where=str(path), code="weights.not-a-tensor"
            )


def stored_layout(folder: Path, parts: Sequence[PipelinePart]) -> MegatronLayout:
    """Read the layout of a folder from its files: numbers of ranks, and layers of each part on each stage."""
    contents = {rank: _models(path, {}) for rank, path in _rank_files(folder).items()}
    return _layout_of(parts, contents, always=True)


def _layout_of(
    parts: Sequence[PipelinePart],
    contents: Mapping[tuple[int, int, int], list[dict[str, StoredTensor]]],
    *,
    always: bool = False,
) -> MegatronLayout:
    """Return the layout of rank files. `always`: include lists of layers even for a single stage."""
    tp, pp, ep = (max(key[axis] for key in contents) + 1 for axis in range(3))
    virtual = len(contents[0, 0, 0])
    layers: dict[str, tuple[tuple[int, ...], ...]] = {}
    if always or pp > 1 or virtual > 1:
        for part in parts:
            layers[part.option] = tuple(
                tuple(_layers_in(part, contents[0, rank, 0], chunk) for rank in range(pp)) for chunk in range(virtual)
            )
    return MegatronLayout(tp, ep, layers)


def _layers_in(part: PipelinePart, chunks: list[dict[str, StoredTensor]], chunk: int) -> int:
    if chunk >= len(chunks):
        return 0
    numbers = {name.removeprefix(part.layers).split(".")[0] for name in chunks[chunk] if name.startswith(part.layers)}
    return len(numbers)


def _global_name(form: MegatronForm, layout: MegatronLayout, stage: int, ep: int, local: str) -> str:
    part = form.part_of(local)
    if part is None or not local.startswith(part.layers):
        return local
    number, _, rest = local.removeprefix(part.layers).partition(".")
    if not number.isdecimal() or len(number) > 6 or int(number) >= sum(layout.stages(part)[stage : stage + 1]):
        raise TesseraError(
            f"the layer number in {local[:200]} is not valid on its stage", code="megatron.no-layer-number"
        )
    name = f"{part.layers}{int(number) + sum(layout.stages(part)[:stage])}.{rest}"
    expert = LOCAL_EXPERT.fullmatch(name)
    if expert is None or layout.ep == 1:
        return name
    return f"{expert[1]}{int(expert[2]) + ep * (form.experts // layout.ep)}{expert[3]}"


def _layout_text(layout: MegatronLayout) -> str:
    lists = ", ".join(f"{option} {[list(chunk) for chunk in chunks]}" for option, chunks in layout.layers.items())
    return f"tp {layout.tp}, ep {layout.ep}" + (f", {lists}" if lists else "")
