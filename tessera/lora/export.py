"""Write adapters as a PEFT folder, or as files of diffusers, ComfyUI and kohya."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.files import write_file, write_safetensors
from tessera.checkpoint.hf import gather_on_rank0, names_on_ranks
from tessera.checkpoint.publish import Origin, publish
from tessera.config.run_config import AdapterForm
from tessera.errors import TesseraError
from tessera.lora.exchange import DOTTED, FILES, FIRST, HEADER_KEY, MAGNITUDE_KEY, UNDERSCORED
from tessera.lora.experts import to_peft, wrapper_names
from tessera.lora.factors import Factors, all_modules, experts_in_memory, parameters_in_memory, plain_form, to_foreign
from tessera.lora.peft import CONFIG, PREFIX, make_config
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
    takes_tokens: bool = True,
    origin: Origin | None = None,
    overwrite: bool = False,
    saved: Collection[str] = (),
) -> None:
    """Write a folder of adapters. Every rank calls this with its part of the model and all `adapters`.

    `saved`: fully trained parameters to write as well. `forms`: the formats to write. `language` and `reward` select
    PEFT's task type: a language model, or a reward model. `takes_tokens`: whether the class of transformers takes
    `input_ids`, as PEFT expects of a language model; otherwise a language model gets no task type.
    """
    check_forms(forms, weight_map, language, str(folder))
    assert weight_map is not None, "checked"
    extra = bool(saved) or any(adapter.dora or adapter.stacked for adapter in adapters.values())
    if extra and any(form != "peft" for form in forms):
        what = "DoRA, adapters of experts and fully trained modules can only be written as a PEFT folder"
        raise TesseraError(what, where=str(folder), allowed=["peft"], code="adapter.peft-form-only")
    tensors, adapters = plain_form(tensors, adapters)
    in_memory = parameters_in_memory(saved, weight_map)  # first, so that an error is raised before gathering
    modules_to_save = sorted({name.rpartition(".")[0] for names in in_memory.values() for name in names})
    names = names_on_ranks(tensors)  # adapters of one pipeline stage may have the name endings of other stages
    wanted = {name for path, adapter in adapters.items() for name in tensor_names(path, adapter)} | set(saved)
    full = gather_on_rank0({name: tensor for name, tensor in tensors.items() if name in wanted})

    def write(staging: Path) -> None:
        native = {}
        for path, adapter in adapters.items():
            a, b = factor_names(path)
            m = full[magnitude_name(path)].cpu() if adapter.dora else None
            native[path] = Factors(adapter, full[a].cpu(), full[b].cpu(), m)
        stacked = {path: factors for path, factors in native.items() if factors.adapter.stacked}
        experts = to_peft(stacked, weight_map, str(folder))
        native = {path: factors for path, factors in native.items() if path not in stacked}
        every_expert = {
            f"{experts_in_memory(home, weight_map, str(folder))}.{name}"
            for home, _, name in (path.rpartition(".") for path in expert_paths(names))
        }
        for form in dict.fromkeys(forms):
            if form in ("peft", "diffusers"):
                modules = to_foreign(native, weight_map, str(folder))
                others = None if weight_map.other_parts else all_modules(names, weight_map)
                kind = "SEQ_CLS" if reward else "CAUSAL_LM" if language and takes_tokens else None
                config = make_config(modules, others, base, dropout, kind, modules_to_save, experts, every_expert)
                named = {name: experts[parameter] for parameter, name in wrapper_names(experts).items()}
                saved_tensors = _saved_tensors(full, in_memory, weight_map)
                _write_peft(staging, form, {**modules, **named}, config, saved_tensors)
            else:
                _write_exchange(staging, form, to_foreign(native, weight_map.others["original"], str(folder)))

    publish(folder, write, origin=origin, overwrite=overwrite)


def check_forms(forms: Sequence[AdapterForm], weight_map: WeightMap | None, language: bool, where: str) -> None:
    """Raise unless adapters of this model can be written in each of the requested formats."""
    if weight_map is None:
        raise TesseraError(
            "this family has no weight map, so adapters cannot be written", where=where, code="adapter.no-weight-map"
        )
    for form in forms:
        if language and form != "peft":
            what = f"{form} is a format for image and video models, not for language models"
            raise TesseraError(what, where=where, allowed=["peft"], code="adapter.generation-form-only")
        if form in ("comfyui", "kohya") and "original" not in weight_map.others:
            raise TesseraError(
                f"{form} uses layer names of the original checkpoint, which this family does not have",
                where=where,
                allowed=["peft", "diffusers"],
                code="adapter.no-original-names",
            )


def _write_peft(
    staging: Path, form: str, modules: Mapping[str, Factors], config: Mapping[str, object], saved: Mapping[str, Tensor]
) -> None:
    """Write the matrices with PEFT's names and configuration, as a PEFT folder or a diffusers file."""
    if form == "peft":
        write_file(staging / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    prefix = PREFIX if form == "peft" else f"{FIRST}."
    sides = {
        f"{prefix}{module}.{side}.weight": tensor
        for module, factors in modules.items()
        for side, tensor in (("lora_A", factors.a), ("lora_B", factors.b))
    }
    sides |= {f"{prefix}{module}{MAGNITUDE_KEY}": f.m for module, f in modules.items() if f.m is not None}
    sides |= {f"{prefix}{name}": tensor for name, tensor in saved.items()}
    stated = {f"{FIRST}.{key}": value for key, value in config.items() if key != "base_model_name_or_path"}
    header = None if form == "peft" else {HEADER_KEY: json.dumps(stated, indent=2, sort_keys=True)}
    write_safetensors(staging / FILES[form], sides, metadata=header)


def _write_exchange(staging: Path, form: str, modules: Mapping[str, Factors]) -> None:
    """Write the matrices and alpha of each layer under the layer names of the original checkpoint."""
    tensors: dict[str, Tensor] = {}
    for module, factors in modules.items():
        name = f"{DOTTED}{module}" if form == "comfyui" else UNDERSCORED + module.replace(".", "_")
        # Readers scale by alpha / rank, also for rsLoRA, so alpha is computed from the scale.
        alpha = torch.tensor(factors.adapter.scale * factors.adapter.rank)
        tensors |= {f"{name}.lora_down.weight": factors.a, f"{name}.lora_up.weight": factors.b, f"{name}.alpha": alpha}
    write_safetensors(staging / FILES[form], tensors)


def _saved_tensors(
    tensors: Mapping[str, Tensor], in_memory: Mapping[str, Sequence[str]], weight_map: WeightMap
) -> dict[str, Tensor]:
    """Return fully trained parameters by their names in PEFT's files. `tensors`: the unsharded tensors."""
    stored: dict[str, Tensor] = {}
    for name, foreign in in_memory.items():
        rule, _ = weight_map.required_rule(name)
        stored |= dict(zip(foreign, rule.op.to_foreign(tensors[name].cpu()), strict=True))
        for copy, native in weight_map.copies:  # PEFT stores the embedding and its tied head, although they are equal
            if native == name:
                stored[weight_map.in_memory(copy)] = tensors[name].cpu()
    return stored
