"""The methods of `mm-convert` for video models: between diffusers folders, original checkpoints and Megatron shards.

Megatron shards are the files of a job, one for each tensor and pipeline rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera.checkpoint.legacy.torch_files import StoredTensor, read_torch_file
from tessera.checkpoint.publish import made_from, publish
from tessera.checkpoint.writer import PlannedFolder
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError, first_line, nearest
from tessera.models import resolve
from tessera.tools.conversion import check_apart
from tessera.tools.convert import convert
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows
from tessera_compat.mindspeed_mm.convert_shards import is_run
from tessera_compat.shards.files import CLASSES, plan_megatron, read_megatron, stored_layout
from tessera_compat.shards.form import MegatronForm
from tessera_compat.shards.layout import MegatronLayout, parse_layout
from tessera_compat.shards.resplit import resplit
from tessera_compat.shards.weight_form import FAMILIES as FORMS

Options = Mapping[str, Any]  # dotted key without the leading `cfg.` -> value
_TARGET = "target_parallel_config."
_PIPELINES = ("wan", "cogvideox")  # families whose jobs support pipeline parallelism
_TENSORS = ("hunyuan_video", "cogvideox")  # families whose jobs support tensor parallelism
_VIRTUAL = ("wan",)
_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def hf_to_mm(family: str, options: Options) -> Path:
    """Write the transformer of a diffusers folder as Megatron shards, which a job loads."""
    _check_version(options)
    layout = target_layout(family, options)
    return convert(options["source_path"], options["target_path"], to="mm", layout=layout)


def mm_to_hf(family: str, options: Options) -> Path:
    """Write Megatron shards, or the run of a job, as the transformer of a diffusers folder."""
    source, like = Path(options["source_path"]), Path(options["hf_dir"])
    if is_run(source):
        return convert(source, options["target_path"])
    return convert(source, options["target_path"], to="hf", like=like)


def resplit_mm(family: str, options: Options) -> Path:
    """Write Megatron shards for other numbers of ranks. The present layout is read from the files."""
    source, target, after = Path(options["source_path"]), options["target_path"], target_layout(family, options)
    if is_run(source):
        return convert(source, target, to="mm", layout=after)
    before = stored_layout(source, _form(family).parts)
    lists = {part: [list(chunk) for chunk in chunks] for part, chunks in before.layers.items()}
    return resplit(source, target, family, {"tp": before.tp, **lists}, after)


def target_layout(family: str, options: Options) -> dict[str, Any]:
    """Return the target layout from the lists and sizes of the options."""
    layers, tp = options.get(f"{_TARGET}pp_layers") or [], options.get(f"{_TARGET}tp_size") or 1
    nested = isinstance(layers, list) and bool(layers) and isinstance(layers[0], list)
    stages = sum(len(one) for one in layers) if nested else len(layers)
    where = f"--cfg.{_TARGET}"
    if tp > 1 and family not in _TENSORS:
        raise TesseraError(
            f"jobs do not support tensor parallelism for {family}",
            where=f"{where}tp_size",
            allowed=[1],
            code="layout.tensor-ranks-refused",
        )
    if tp > 1 and options.get("version") == "i2v" and family == "hunyuan_video":
        raise TesseraError(
            "image-to-video jobs of HunyuanVideo do not support tensor parallelism",
            where=f"{where}tp_size",
            code="layout.tensor-ranks-refused",
        )
    if stages > 1 and family not in _PIPELINES:
        raise TesseraError(
            f"MindSpeed-MM does not support pipeline parallelism for {family}",
            where=f"{where}pp_layers",
            allowed=["[]"],
            code="layout.pipeline-refused",
        )
    if nested and len(layers) > 1 and family not in _VIRTUAL:
        raise TesseraError(
            f"jobs do not support virtual pipeline stages for {family}",
            where=f"{where}pp_layers",
            fix="pass a single list",
            code="layout.virtual-stages-refused",
        )
    if options.get(f"{_TARGET}ep_size", 1) not in (0, 1):
        raise TesseraError(
            "video models have no experts, so ep_size must be 1",
            where=f"{where}ep_size",
            allowed=[1],
            code="layout.experts-refused",
        )
    return {"tp": tp, **({"dit": layers} if stages > 1 else {})}


def _form(family: str) -> MegatronForm:
    """Describe the Megatron shards of a family. Only its tensor names are used; sizes come from the files."""
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    return FORMS[spec.name](config)


def _check_version(options: Options) -> None:
    if str(options.get("version", "")).endswith("-lora"):
        raise TesseraError(
            "adapters of original HunyuanVideo checkpoints cannot be converted",
            where="--version",
            allowed=["t2v", "i2v"],
            fix="load adapters of PEFT or diffusers by model.lora.path in a recipe",
            code="adapter.original-format",
        )


# ---------------------------------------------------------------------------------------------- original checkpoints

Tensors = dict[str, Tensor]
_HUNYUAN_NAMES = (
    (r"(txt_in\.t_embedder|time_in|guidance_in)\.mlp\.", r"\1.time_embed."),
    (r"vector_in\.in_layer\.", "vector_in.fc1."),
    (r"vector_in\.out_layer\.", "vector_in.fc2."),
    (r"final_layer\.linear\.", "proj_out."),
    (r"final_layer\.adaLN_modulation\.", "adaLN_modulation."),
)
_COG = r"model\.diffusion_model\."
_COG_LAYER = _COG + r"transformer\.layers\.(\d+)\."
_COG_BLOCK = r"videodit_blocks.\1."
_COG_NAMES = (
    (_COG + r"time_embed\.", "time_embed.time_embed."),
    (_COG + r"ofs_embed\.", "ofs_embed."),
    (_COG + r"mixins\.patch_embed\.proj\.", "patch_embed.proj."),
    (_COG + r"mixins\.patch_embed\.text_proj\.", "caption_projection."),
    (_COG + r"mixins\.pos_embed\.", "pos_embed."),
    (_COG + r"transformer\.final_layernorm\.", "norm_final."),
    (_COG + r"mixins\.final_layer\.norm_final\.", "norm_out."),
    (_COG + r"mixins\.final_layer\.linear\.", "proj_out_linear."),
    (_COG + r"mixins\.final_layer\.adaLN_modulation\.", "adaLN_modulation."),
    (_COG + r"mixins\.adaln_layer\.adaLN_modulations\.(\d+)\.", _COG_BLOCK + "scale_shift_table."),
    (_COG + r"mixins\.adaln_layer\.query_layernorm_list\.(\d+)\.", _COG_BLOCK + "self_atten.q_norm."),
    (_COG + r"mixins\.adaln_layer\.key_layernorm_list\.(\d+)\.", _COG_BLOCK + "self_atten.k_norm."),
    (_COG_LAYER + r"input_layernorm\.", _COG_BLOCK + "norm1."),
    (_COG_LAYER + r"post_attention_layernorm\.", _COG_BLOCK + "norm2."),
    (_COG_LAYER + r"attention\.dense\.", _COG_BLOCK + "self_atten.proj_out."),
    (_COG_LAYER + r"attention\.query_key_value\.", _COG_BLOCK + "self_atten.proj_qkv."),
    (_COG_LAYER + r"mlp\.dense_h_to_4h\.", _COG_BLOCK + "ff.net.0.proj."),
    (_COG_LAYER + r"mlp\.dense_4h_to_h\.", _COG_BLOCK + "ff.net.2."),
)


def hunyuan_source_to_mm(family: str, options: Options) -> Path:
    """Write an original HunyuanVideo checkpoint as Megatron shards, which a job loads."""
    _check_version(options)
    tensors = _renamed(_source_tensors(Path(options["source_path"])), _HUNYUAN_NAMES)
    for name in [name for name in tensors if re.fullmatch(r"single_blocks\.\d+\.linear1\.(weight|bias)", name)]:
        tensor, number = tensors.pop(name), name.split(".")[1]
        width = tensors[f"single_blocks.{number}.linear2.weight"].shape[
            0
        ]  # number of rows of queries, of keys and of values
        kind = name.rpartition(".")[2]
        tensors[f"single_blocks.{number}.linear1_qkv.{kind}"] = tensor[: 3 * width]
        tensors[f"single_blocks.{number}.linear1_mlp.{kind}"] = tensor[3 * width :]
    return _write(family, options, tensors)


def cog_source_to_mm(family: str, options: Options) -> Path:
    """Write an original CogVideoX checkpoint as Megatron shards. Layers that jobs do not have are dropped."""
    tensors = _renamed(_source_tensors(Path(options["source_path"])), _COG_NAMES)
    tensors = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("model.", "first_stage_model."))
    }
    if options.get("remove_pos_emb"):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("pos_embed.")}
    return _write(family, options, tensors)


def _source_tensors(path: Path) -> Tensors:
    """Read the tensors of a safetensors file or a torch file. In a torch file they may be under the key `module`."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise TesseraError(
                f"not a safetensors file: {first_line(error)}", where=str(path), code="weights.invalid-safetensors"
            ) from None
    if not path.is_file():
        raise TesseraError(
            f"no such file: {path}",
            where="--cfg.source_path",
            fix="pass a .pt or .safetensors file",
            code="job.file-missing",
        )
    content = read_torch_file(path, CLASSES)
    content = content.get("module", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not any(isinstance(one, StoredTensor) for one in content.values()):
        raise TesseraError(
            "the file contains no tensors by name",
            where=str(path),
            fix="pass a file whose tensors are at the top level or under the key `module`",
            code="weights.no-model-in-file",
        )
    return {str(name): one.read() for name, one in content.items() if isinstance(one, StoredTensor)}


def _renamed(tensors: Tensors, names: tuple[tuple[str, str], ...]) -> Tensors:
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, word in names:
            new, count = re.subn("^" + pattern, word, new)
            if count:
                break
        if not name.endswith("_extra_state"):
            renamed[new] = tensor
    return renamed


def _write(family: str, options: Options, tensors: Mapping[str, Tensor]) -> Path:
    """Write unsharded tensors, which have their Megatron names, as rank files in the target layout."""
    source, target = Path(options["source_path"]), Path(options["target_path"])
    check_apart(target, source)
    layout = parse_layout(target_layout(family, options))
    form = _sized(_form(family), tensors, layout)
    parts = {rule for rule in (form.part_of(name) for name in tensors) if rule is not None}
    strange = [name for name in tensors if form.part_of(name) is None]
    if strange or not parts:
        raise TesseraError(
            f"{strange[0]} is not a tensor of {family}" if strange else f"the file contains no tensor of {family}",
            where=str(source),
            nearest=nearest(strange[0], [part.layers for part in form.parts]) if strange else None,
            fix="pass the original checkpoint of the model",
            code="weights.unknown-tensor",
        )
    plans = {name: PlannedTensor.of(tensor) for name, tensor in tensors.items()}

    def write(staging: Path) -> None:
        with PlannedFolder(staging, plan_megatron(form, layout, plans, str(target))) as files:
            for name, tensor in tensors.items():
                files.put(name, TensorRows.of(tensor))
            files.sync()

    publish(target, write, origin=made_from("mm", source))
    return target


def _sized(form: MegatronForm, tensors: Mapping[str, Any], layout: MegatronLayout) -> MegatronForm:
    """Return `form` with the number of layers in `tensors`, which have their Megatron names."""
    counts = {
        layers: len({name.removeprefix(layers).split(".")[0] for name in tensors if name.startswith(layers)})
        for layers in (part.layers for part in form.parts)
    }
    parts = tuple(replace(part, count=counts[part.layers]) for part in form.parts)
    whole = WeightMap((), same_names=True)
    return replace(form, weights=whole, parts=parts, kv_heads=layout.tp)


# ---------------------------------------------------------------------------------------------- adapters


def merge_lora(family: str, options: Options) -> Path:
    """Merge the adapters of a job into the Megatron shards of its base model."""
    rank, alpha = options.get("lora_rank", 8), options.get("lora_alpha", 16)
    if not rank or rank < 0:
        raise TesseraError(
            f"the rank of adapters cannot be {rank}",
            where="--lora_rank",
            allowed=["1 or more"],
            code="adapter.invalid-rank",
        )
    folders = {key: Path(options[key]) for key in ("source_path", "lora_path")}
    for key, folder in folders.items():
        if is_run(folder):
            raise TesseraError(
                f"{folder} is a run of Tessera, not shards",
                where=f"--cfg.{key}",
                fix=f"tessera convert {folder} TARGET merges its adapters; --to mm writes shards",
                code="adapter.run-not-shards",
            )
    base, adapters = (_whole(family, folder) for folder in folders.values())
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapters.items():
        match = _ADAPTER.fullmatch(name)
        if match is None:
            raise TesseraError(
                f"the tensor {name} is no adapter weight",
                where=str(folders["lora_path"]),
                code="adapter.unknown-tensor",
            )
        pairs.setdefault(f"{match[1].removeprefix('base_model.model.')}.weight", {})[match[2]] = tensor
    merged = dict(base)
    for name, pair in pairs.items():
        if name not in base or set(pair) != {"A", "B"}:
            raise TesseraError(
                f"the adapter of {name} "
                f"{'has only one of its two matrices A and B' if name in base else 'has no layer in the base model'}",
                where=str(folders["lora_path"]),
                nearest=nearest(name, base),
                code="adapter.unknown-layer",
            )
        if pair["A"].shape[0] != rank:
            raise TesseraError(
                f"the adapter of {name} has rank {pair['A'].shape[0]}",
                where="--lora_rank",
                code="adapter.rank-mismatch",
            )
        added = (alpha / rank) * (pair["B"].to(torch.float32) @ pair["A"].to(torch.float32))
        merged[name] = (base[name].to(torch.float32) + added).to(base[name].dtype)
    return _write(family, options, merged)


def _whole(family: str, folder: Path) -> Tensors:
    """Read the tensors of a folder with a single rank, by Megatron names. Adapters may exist for some layers only."""
    form = _form(family)
    before = stored_layout(folder, form.parts)
    if before.tp > 1 or before.pp > 1:
        raise TesseraError(
            f"the shards belong to {before.tp} tensor ranks and {before.pp} pipeline ranks, not to one rank",
            where=str(folder),
            fix="join them first: mm-convert CONVERTER resplit, without pp_layers and tp_size",
            code="layout.several-ranks",
        )
    free = replace(form, weights=WeightMap((), same_names=True), parts=(), splits=())
    tensors, _ = read_megatron(folder, free)
    return {name: tensor.read() for name, tensor in tensors.items()}


SOURCES: Mapping[str, Callable[[str, Options], Path]] = {
    "hunyuan_video": hunyuan_source_to_mm,
    "cogvideox": cog_source_to_mm,
}
