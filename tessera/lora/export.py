"""Write adapters in the forms that people exchange: a PEFT folder, and files of diffusers, ComfyUI and kohya."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.files import Entry, SafetensorsFile, storage_order, write_file
from tessera.checkpoint.hf import gather_on_rank0
from tessera.checkpoint.publish import Origin, publish
from tessera.config.run_config import AdapterForm
from tessera.errors import TesseraError
from tessera.lora.experts import experts_in_memory, to_peft, wrapper_names
from tessera.lora.factors import Factors, to_foreign
from tessera.lora.files import DOTTED, FILES, FIRST, HEADER_KEY, UNDERSCORED
from tessera.lora.parts import MAGNITUDE_KEY, modules_of, plain_form, saved_tensors
from tessera.lora.peft import CONFIG, PREFIX, WEIGHTS, make_config
from tessera.lora.select import Adapters, expert_paths, factor_names, magnitude_name, tensor_names
from tessera.weights.map import WeightMap


def save_adapters(
    folder: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    weight_map: WeightMap | None,
    *,
    forms: Sequence[AdapterForm] = ("peft",),
    base: str = "",
    dropout: float = 0.0,
    language: bool = True,
    reward: bool = False,
    origin: Origin | None = None,
    overwrite: bool = False,
    saved: Collection[str] = (),
) -> None:
    """Write a folder of adapters. Every rank calls this with its part of the model and all `adapters`.

    `saved`: parameters that were trained whole beside them. `forms`: which files it has. `language`: whether the model
    is one that PEFT gives the methods of a language model; `reward`: those of a model with one number for a head.
    """
    check_forms(forms, weight_map, language, str(folder))
    assert weight_map is not None, "checked"
    extra = bool(saved) or any(adapter.dora or adapter.stacked for adapter in adapters.values())
    if extra and any(form != "peft" for form in forms):
        raise TesseraError(
            "DoRA, adapters of experts and modules that were trained whole have no such form",
            where=str(folder),
            allowed=["peft"],
        )
    tensors, adapters = plain_form(tensors, adapters)
    modules_to_save = modules_of(saved, weight_map)  # what has no name there is told before anything is gathered
    wanted = {name for path, adapter in adapters.items() for name in tensor_names(path, adapter)} | set(saved)
    whole = gather_on_rank0({name: tensor for name, tensor in tensors.items() if name in wanted})

    def write(staging: Path) -> None:
        native = {}
        for path, adapter in adapters.items():
            a, b = factor_names(path)
            m = whole[magnitude_name(path)].cpu() if adapter.dora else None
            native[path] = Factors(adapter, whole[a].cpu(), whole[b].cpu(), m)
        experts = to_peft({p: one for p, one in native.items() if one.adapter.stacked}, weight_map, str(folder))
        native = {path: one for path, one in native.items() if not one.adapter.stacked}
        modules, of_experts = _all_modules(tensors, weight_map), _all_experts(tensors, weight_map, str(folder))
        for form in dict.fromkeys(forms):
            if form in ("peft", "diffusers"):
                made = to_foreign(native, weight_map, str(folder))
                kind = _task_type(language, reward)
                config = make_config(made, modules, base, dropout, kind, modules_to_save, experts, of_experts)
                named = {name: experts[parameter] for parameter, name in wrapper_names(experts).items()}
                _write_peft(staging, form, {**made, **named}, config, saved_tensors(whole, saved, weight_map))
            else:
                _write_exchange(staging, form, to_foreign(native, weight_map.others["original"], str(folder)))

    publish(folder, write, origin=origin, overwrite=overwrite)


def _task_type(language: bool, reward: bool) -> str | None:
    return "SEQ_CLS" if reward else "CAUSAL_LM" if language else None


def check_forms(forms: Sequence[AdapterForm], weight_map: WeightMap | None, language: bool, where: str) -> None:
    """Raise if adapters of a model cannot be written in one of these forms."""
    if weight_map is None:
        raise TesseraError("this family has no weight map: it cannot exchange adapters", where=where)
    for form in forms:
        if language and form != "peft":
            raise TesseraError(
                f"{form} loads adapters of models of images and videos; those of language models have one form",
                where=where,
                allowed=["peft"],
            )
        if form in ("comfyui", "kohya") and "original" not in weight_map.others:
            raise TesseraError(
                f"adapters of {form} have the names of the model's makers, and those of this family are not known",
                where=where,
                allowed=["peft", "diffusers"],
            )


def _write_peft(
    staging: Path,
    form: str,
    made: Mapping[str, Factors],
    config: Mapping[str, object],
    saved: Mapping[str, Tensor],
) -> None:
    """Write the matrices under the names of diffusers or transformers, with PEFT's configuration."""
    if form == "peft":
        write_file(staging / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    prefix = PREFIX if form == "peft" else f"{FIRST}."
    sides = {
        f"{prefix}{module}.{side}.weight": tensor
        for module, factors in made.items()
        for side, tensor in (("lora_A", factors.a), ("lora_B", factors.b))
    }
    sides |= {f"{prefix}{module}{MAGNITUDE_KEY}": f.m for module, f in made.items() if f.m is not None}
    sides |= {f"{prefix}{name}": tensor for name, tensor in saved.items()}
    stated = {f"{FIRST}.{key}": value for key, value in config.items() if key != "base_model_name_or_path"}
    header = None if form == "peft" else {HEADER_KEY: json.dumps(stated, indent=2, sort_keys=True)}
    _write(staging / (WEIGHTS if form == "peft" else FILES[form]), sides, header)


def _write_exchange(staging: Path, form: str, made: Mapping[str, Factors]) -> None:
    """Write the matrices and the alpha of each layer under the names of the model's makers."""
    tensors: dict[str, Tensor] = {}
    for module, factors in made.items():
        name = f"{DOTTED}{module}" if form == "comfyui" else UNDERSCORED + module.replace(".", "_")
        # Readers scale by alpha / rank, whatever the run did.
        alpha = torch.tensor(factors.adapter.scale * factors.adapter.rank)
        tensors |= {f"{name}.lora_down.weight": factors.a, f"{name}.lora_up.weight": factors.b, f"{name}.alpha": alpha}
    _write(staging / FILES[form], tensors, None)


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None) -> None:
    entries = [Entry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]
    with SafetensorsFile(path, entries, metadata=header) as file:
        for entry in storage_order(entries):
            file.put(entry.key, tensors[entry.key].contiguous())


def _all_experts(tensors: Mapping[str, Tensor], weight_map: WeightMap, where: str) -> set[str]:
    """Return the names in transformers of all parameters that adapters of experts could be for, as `_all_modules`."""
    parts = (path.rpartition(".") for path in expert_paths(tensors))
    return {f"{experts_in_memory(home, weight_map, where)}.{name}" for home, _, name in parts}


def _all_modules(tensors: Mapping[str, Tensor], weight_map: WeightMap) -> set[str]:
    """Return the modules that this rank has of the model: those of other stages have the same endings."""
    found = [weight_map.rule_for(name) for name in tensors if name.endswith(".weight")]
    return {weight_map.in_memory(name).removesuffix(".weight") for match in found if match for name in match[1]}
