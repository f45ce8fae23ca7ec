"""Rewrite the rank files of a Megatron job for other numbers of ranks, without the Hugging Face folder of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.checkpoint.forms import NativeTensors
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weights import same_numbers
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.tools.conversion import check_apart
from tessera.weights.map import WeightMap
from tessera_compat.shards.files import plan_megatron
from tessera_compat.shards.form import MegatronForm
from tessera_compat.shards.layout import MegatronLayout, parse_layout
from tessera_compat.shards.weight_form import FAMILIES as FORMS
from tessera_compat.shards.weight_form import MegatronFolder


def resplit(
    source: str | Path,
    target: str | Path,
    family: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    like: Path | None = None,
) -> Path:
    """Write the rank files in `source` with the layout `after` to `target`, and return that folder.

    Tensor names and layer lists are usually enough. `like`: a Hugging Face folder whose configuration is needed for
    some families.
    """
    check_apart(Path(target), Path(source), like)
    old, new = parse_layout(before), parse_layout(after)
    if like is not None:
        form = FORMS[family](resolve(ModelSection(path=like))[1])
    elif family == "internvl":
        raise TesseraError(
            "the number of heads of this encoder is only in config.json",
            where=family,
            fix="add --cfg.hf_config.hf_dir FOLDER",
            code="job.config-folder-missing",
        )
    else:
        quickstart = resolve(ModelSection(family=family, preset="quickstart"))[1]
        form = _form_by_lists(FORMS[family](quickstart), old, new)
    whole = replace(form, weights=WeightMap((), same_names=True))  # tensors keep their Megatron names

    def reopen(folder: Path, layout: MegatronLayout = new) -> NativeTensors:
        stored = MegatronFolder(folder, whole, layout)
        shapes = {name: planned.shape for name, planned in stored.tensors().items()}
        return NativeTensors(stored, whole.weights, shapes, {})

    stored = MegatronFolder(Path(source), whole, old)
    stored.check_copies(whole.weights)
    if like is None:
        form = replace(form, tied=_is_tied(stored, form))
        whole = replace(whole, tied=form.tied)
    with reopen(Path(source), old) as native:
        plan = plan_megatron(form, new, native.plans, str(target))
        origin = made_from("mm", source)
        write_weights(Path(target), WriteJob(native, whole.weights, plan, reopen, origin=origin))
    return Path(target)


def _is_tied(stored: MegatronFolder, form: MegatronForm) -> bool:
    """Return whether the output layer is tied to the embedding: it is not stored, or equal to the embedding."""
    shapes = {name: planned.shape for name, planned in stored.tensors().items()}
    if form.table not in shapes:
        return False
    return form.head not in shapes or same_numbers(form.head, form.table, shapes, stored.read)


def _form_by_lists(form: MegatronForm, old: MegatronLayout, new: MegatronLayout) -> MegatronForm:
    """Return `form` for a folder whose model is known only from its files.

    Layers are counted in the layer lists of `old`. The model is assumed to have no experts and an untied output layer,
    and the least number of key-value heads that the tensor-parallel sizes of both layouts divide.
    """
    parts = tuple(replace(part, count=sum(old.stages(part))) for part in form.parts)
    return replace(form, parts=parts, kv_heads=math.lcm(old.tp, new.tp), experts=0, tied=False)
