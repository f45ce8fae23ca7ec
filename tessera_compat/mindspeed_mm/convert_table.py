"""The converters of `mm-convert`, their methods and options, under the names of MindSpeed-MM.

A method that is not supported raises an error with the reason and an alternative.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.config.reader import read_mapping
from tessera.errors import TesseraError
from tessera.tools.convert import convert
from tessera.weights.layouts import CLASS_NAME
from tessera_compat.mindspeed_mm import convert_dcp, convert_shards
from tessera_compat.mindspeed_mm.convert_dcp import Naming
from tessera_compat.mindspeed_mm.convert_options import Converter, Method, Option, Options
from tessera_compat.mindspeed_mm.convert_shards import form_like, is_run
from tessera_compat.mindspeed_mm.convert_video_table import VIDEO_CONVERTERS
from tessera_compat.mindspeed_mm.full_model import with_other_parts

# ---------------------------------------------------------------------------------------------- options

_PATH = functools.partial(Option, "path", required=True)
_CANONICAL = "separate projections are supported only for adapters: convert the fused structure"


def _parallel(prefix: str, kind: Any, hears: bool) -> dict[str, Option]:
    """Return the options of a parallel layout.

    `kind`: type of the lists with the number of layers per stage. `hears`: the model has an audio encoder.
    """
    audio = Option(kind, refused="no model of this converter has an audio encoder")
    if hears:
        audio = Option(kind, "layers of the audio encoder on each pipeline rank", required=True)
    return {
        f"{prefix}llm_pp_layers": Option(kind, "layers of the decoder on each pipeline rank", required=True),
        f"{prefix}vit_pp_layers": Option(kind, "layers of the vision encoder on each pipeline rank", required=True),
        f"{prefix}audio_pp_layers": audio,
        f"{prefix}tp_size": Option("size", "tensor ranks", 1),
        f"{prefix}vit_tp_size": Option("size", "tensor ranks of the vision encoder; 0: tp_size", 0),
        f"{prefix}audio_tp_size": Option("size", "tensor ranks of the audio encoder; 0: tp_size", 0),
        f"{prefix}ep_size": Option("size", "expert ranks", 1),
    }


_BESIDE = {
    "trust_remote_code": Option("flag", "accepted; the code of folders is never run", False),
    "llm_hf_config.hf_dir": Option(
        "path", refused="the decoder cannot be in another folder: make one Hugging Face folder first"
    ),
    "save_vit_only": Option(
        "flag", default=False, refused="a single encoder is not written: freeze the parts that you do not train"
    ),
    **{
        f"common_model_config.{key}": Option("size", "accepted; read from config.json")
        for key in ("num_experts", "num_key_value_heads", "llm_num_layers", "vit_num_layers", "audio_num_layers")
    },
    "common_model_config.tie_word_embeddings": Option("flag", "accepted; read from config.json"),
    "common_model_config.llm_hf_dir": Option("path", refused="the decoder cannot be in another folder"),
}
_ANY_NAMES = {
    "common_model_config.new_transformers_weight_key": Option("flag", "accepted; both spellings of names are read"),
    "common_model_config.model_prefix": Option("text", "accepted; both spellings of names are read"),
    "common_model_config.enable_canonical_hf_struct": Option("flag", default=False, refused=_CANONICAL),
}
_LORA_NAMES = {
    "common_model_config.enable_canonical_hf_struct": Option("flag", "true: layer structure of the folder", False),
    "common_model_config.model_prefix": Option("text", 'prefix of names in the folder; PEFT: "base_model.model."', ""),
    "common_model_config.new_transformers_weight_key": Option("flag", "names begin with model.language_model.", False),
}
_MM_DIR, _HF_DIR = _PATH("folder of the shards"), _PATH("Hugging Face folder")


def _shards(hears: bool = False) -> dict[str, Method]:
    """Return the methods between Hugging Face folders and shards. `hears`: see `_parallel`."""
    return {
        "hf_to_mm": Method(
            "Convert a Hugging Face folder to Megatron shards; lists have a list for each virtual stage.",
            convert_shards.hf_to_mm,
            {
                "mm_dir": _MM_DIR,
                "hf_config.hf_dir": _HF_DIR,
                **_parallel("parallel_config.", "lists", hears),
                **_BESIDE,
                **_ANY_NAMES,
            },
        ),
        "mm_to_hf": Method(
            "Join shards to a Hugging Face folder; lists have a number for each pipeline rank.",
            convert_shards.mm_to_hf,
            {
                "save_hf_dir": _PATH("folder to write"),
                "mm_dir": _MM_DIR,
                "hf_config.hf_dir": _HF_DIR,
                **_parallel("parallel_config.", "list", hears),
                **_BESIDE,
                **_ANY_NAMES,
            },
        ),
        "resplit": Method(
            "Convert shards to another layout.",
            convert_shards.resplit_mm,
            {
                "source_dir": _MM_DIR,
                "target_dir": _PATH("folder to write"),
                "hf_config.hf_dir": Option("path", "Hugging Face folder, for the number of heads"),
                **_parallel("source_parallel_config.", "list", hears),
                **_parallel("target_parallel_config.", "list", hears),
                "trust_remote_code": _BESIDE["trust_remote_code"],
            },
        ),
    }


_LORA_SHARDS = {
    "lora_hf_to_mm": Method(
        "Shard the adapters of a PEFT folder for a job.",
        convert_shards.lora_hf_to_mm,
        {
            "mm_dir": _MM_DIR,
            "hf_config.hf_dir": _PATH("folder of the adapters"),
            **_parallel("parallel_config.", "lists", False),
            "save_vit_only": _BESIDE["save_vit_only"],
            **_LORA_NAMES,
        },
    ),
    "lora_mm_to_hf": Method(
        "Join the adapter shards of a job to a PEFT folder.",
        convert_shards.lora_mm_to_hf,
        {
            "save_hf_dir": _PATH("folder to write"),
            "mm_dir": _MM_DIR,
            "hf_config.hf_dir": Option("path", "folder with the adapter_config.json that the job began with"),
            **_parallel("parallel_config.", "list", False),
            "trust_remote_code": _BESIDE["trust_remote_code"],
            **_LORA_NAMES,
        },
    ),
    "hf_to_mm_ldt": Method(
        "Shard a folder for a job that runs on edge and cloud.",
        refused="training between edge and cloud is not supported; hf_to_mm writes shards of all other layouts",
    ),
    "hf_to_mm_dcp": Method(
        "Write Megatron names in a DCP folder.",
        refused="it never worked in MindSpeed-MM; hf_to_mm writes shards, GenericDCPConverter hf_to_dcp a DCP folder",
    ),
}

# ---------------------------------------------------------------------------------------------- DCP

_NAMES_OPTIONS = {
    "dcp_prefix": Option("text", "prefix of names in the job"),
    "hf_prefix": Option("text", "prefix of names in the folder, which dcp_prefix replaces", ""),
    "fused_linear_names": Option("names", "stacked experts with these in their name lose their first dimension"),
}
_TRUST = {"trust_remote_code": _BESIDE["trust_remote_code"]}
_WORKERS = {"num_workers": Option("size", "accepted; tensors are streamed", 0)}
_BF16 = {"to_bf16": Option("flag", "write numbers as bfloat16", False)}
_HEAD = (("lm_head.weight", "model.language_model.embed_tokens.weight"),)
_FUSED = ("gate_up_proj", "down_proj")
_QWEN3_VL = Naming("model.", fused=_FUSED, tied=_HEAD)
_MISTRAL3 = Naming(
    "model.",
    renames=(
        ("language_model.model", "model.language_model"),
        ("vision_tower", "model.vision_tower"),
        ("multi_modal_projector", "model.multi_modal_projector"),
        ("language_model.lm_head", "lm_head"),
    ),
    fused=_FUSED,
    tied=(("lm_head.weight", "language_model.model.embed_tokens.weight"),),
)
_QWEN35 = Naming(
    merge="stacked", swap=r"(model\.language_model|mtp)\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj", tied=_HEAD
)
_BASE = "base_model.model."  # prefix of tensor names in the checkpoints of a job that trains adapters


def _named(options: Options, naming: Naming) -> Naming:
    """Return a `Naming` with the values of the options in place of its defaults."""
    ties = options.get("tie_weight_mapping", {})
    prefix = options.get("dcp_prefix", naming.prefix)
    return Naming(
        (_BASE if options.get("is_lora_base") else "") + prefix,
        options.get("hf_prefix", naming.replaced),
        naming.renames,
        tuple(options.get("fused_linear_names", naming.fused)),
        (*naming.tied, *((str(copy), str(original)) for copy, original in ties.items())),
        naming.merge,
        (*naming.apart, *(("mtp.",) if options.get("keep_origin_mtp_weights") else ())),
        naming.swap,
    )


def _hf_to_dcp(naming: Naming, _: str, options: Options) -> Path:
    copies = bool(options.get("tie_weight") or options.get("tie_weight_mapping"))
    folder, target = Path(options["hf_dir"]), Path(options.get("dcp_dir") or options["save_dir"])
    return convert_dcp.hf_to_dcp(folder, target, _named(options, naming), copies=copies)


def _dcp_to_hf(naming: Naming, _: str, options: Options) -> Path:
    source = options.get("load_dir") or options["dcp_dir"]
    target = options.get("save_hf_dir") or options["save_dir"]
    like = options.get("model_assets_dir") or options.get("origin_hf_dir") or options["hf_dir"]
    if is_run(Path(source)):  # a run of Tessera has the names of the Hugging Face folder that it started from
        dtype = "bfloat16" if options.get("to_bf16") else None

        def write(folder: Path) -> Path:
            return convert(source, folder, to=form_like(Path(like)), like=like, dtype=dtype)

        return with_other_parts(Path(like), Path(target), write)
    return convert_dcp.dcp_to_hf(
        Path(source),
        Path(target),
        Path(like),
        _named(options, naming),
        dtype=torch.bfloat16 if options.get("to_bf16") else None,
    )


def _lora_hf_to_dcp(_: str, options: Options) -> Path:
    return convert_dcp.lora_hf_to_dcp(Path(options["hf_dir"]), Path(options["dcp_dir"]))


def _merge_lora(naming: Naming, _: str, options: Options) -> Path:
    base, adapters, target = (Path(options[key]) for key in ("base_hf_dir", "lora_dcp_dir", "save_merged_hf_dir"))
    if is_run(adapters):  # a run of Tessera stores the adapted layers and their scaling
        return convert(adapters, target, to=form_like(base), like=base)
    modules, scaling = options["lora_target_modules"], float(options.get("scaling", 1.0))
    return convert_dcp.merge_lora(base, adapters, target, modules, scaling, naming)


def _dcp(naming: Naming, to: Mapping[str, Option], back: Mapping[str, Option]) -> dict[str, Method]:
    return {
        "hf_to_dcp": Method(
            "Convert a Hugging Face folder to a DCP folder, which a job with FSDP2 loads.",
            functools.partial(_hf_to_dcp, naming),
            to,
            "",
        ),
        "dcp_to_hf": Method(
            "Convert the DCP folder of a job with FSDP2 to a Hugging Face folder.",
            functools.partial(_dcp_to_hf, naming),
            back,
            "",
        ),
    }


def _dcp_lora(naming: Naming) -> dict[str, Method]:
    return {
        "lora_hf_to_dcp": Method(
            "Convert the adapters of a PEFT folder to a DCP folder, which a job loads.",
            _lora_hf_to_dcp,
            {"hf_dir": _PATH("folder of the adapters"), "dcp_dir": _PATH("folder to write")},
            "",
        ),
        "merge_mm_lora_dcp_weight_to_base_hf": Method(
            "Merge the adapters of a job into the folder that it began from; weights keep their dtype.",
            functools.partial(_merge_lora, naming),
            {
                "base_hf_dir": _HF_DIR,
                "lora_dcp_dir": _PATH("DCP folder with the adapters"),
                "lora_target_modules": Option("names", "modules with adapters, such as q_proj,v_proj", required=True),
                "save_merged_hf_dir": _PATH("folder to write"),
                "scaling": Option("number", "alpha / rank of the adapters", 1.0),
            },
            "",
        ),
    }


_NO_SHARDS = {
    name: Method(
        "(not supported)",
        refused="this converter supports only DCP, and the method is empty in MindSpeed-MM: use hf_to_dcp or dcp_to_hf",
    )
    for name in ("hf_to_mm", "mm_to_hf", "resplit")
}
_DCP_DIR, _ASSETS = _PATH("DCP folder"), _PATH("Hugging Face folder that the job began from")
_TO = {"hf_dir": _HF_DIR, "dcp_dir": _PATH("folder to write")}
_BACK = {"load_dir": _DCP_DIR, "save_dir": _PATH("folder to write"), "model_assets_dir": _ASSETS}
_TIE = {"tie_weight": Option("flag", "also write the output layer that is tied to the embeddings", False)}
_LORA_BASE = {"is_lora_base": Option("flag", "use the names of a job that trains adapters", False)}
_PAIRS = {"tie_weight_mapping": Option("pairs", "copies to write: {name: name of the copied tensor}")}
_EXPERT_NAMES = {
    "dcp_prefix": Option("text", "prefix of names in the job", "model."),
    "hf_prefix": _NAMES_OPTIONS["hf_prefix"],
}


def type_of(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise TesseraError(
            "the folder has no config.json",
            where=str(folder),
            fix="name a Hugging Face folder",
            code="weights.no-config",
        )
    content = read_mapping(folder / "config.json")
    return str(content.get("model_type") or content.get(CLASS_NAME, ""))


def _merging(run: Callable[[Naming, str, Options], Path]) -> Callable[[str, Options], Path]:
    """Return a conversion that merges experts. Omni models need another shape and other names."""

    def work(family: str, options: Options) -> Path:
        omni = type_of(Path(options["hf_dir"])) == "qwen3_omni_moe"
        naming = Naming("model.", merge="flat")
        if omni:
            naming = Naming("model.", merge="stacked", renames=(("thinker.", ""),), apart=("talker.", "code2wav."))
        return run(naming, family, options)

    return work


def _moe_expert(_: str, options: Options) -> Path:
    style, size = options["style"], options.get("max_shard_size", "4GB")
    match = re.fullmatch(r"(\d{1,6})([KMGT]?)B", size, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise TesseraError(
            f"{size!r} is not a valid size",
            where="--max_shard_size",
            fix="write --max_shard_size 4GB",
            code="job.shard-size",
        )
    shard_bytes = int(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")
    folder, target = Path(options["hf_dir"]), Path(options["save_dir"])
    return convert_dcp.merge_experts(folder, target, split=style == "split", shard_bytes=shard_bytes)


_EXPERTS = {
    "hf_to_dcp": Method(
        "Write a folder with the matrices of all experts of a layer in one, as a job with FSDP2 loads it.",
        _merging(_hf_to_dcp),
        {"hf_dir": _HF_DIR, "save_dir": _PATH("folder to write"), **_EXPERT_NAMES},
        "",
    ),
    "dcp_to_hf": Method(
        "Write the model of such a job as a Hugging Face folder, each expert by itself again.",
        _merging(_dcp_to_hf),
        {"hf_dir": _ASSETS, "dcp_dir": _DCP_DIR, "save_dir": _PATH("folder to write"), **_EXPERT_NAMES},
        "",
    ),
}
_MOE_EXPERT = Method(
    "Merge the matrices of a folder's experts, or split them again.",
    _moe_expert,
    {
        "style": Option("text", "merge or split", required=True, choices=("merge", "split")),
        "hf_dir": _HF_DIR,
        "save_dir": _PATH("folder to write"),
        "max_shard_size": Option("text", "of the files that are written", "4GB"),
    },
    "",
)

# ---------------------------------------------------------------------------------------------- the converters


def _refused(reason: str, *names: str) -> Converter:
    return Converter("", {name: Method("(refused)", refused=reason) for name in names})


_VIDEO = "Tessera does not support this model: convert with MindSpeed-MM itself"
_SOUND = "Tessera does not support this speech model: convert with MindSpeed-MM itself"
_THREE = ("hf_to_mm", "mm_to_hf", "resplit")
CONVERTERS: Mapping[str, Converter] = {
    "Qwen2VLConverter": Converter("qwen2_vl", _shards()),
    "Qwen2_5_VLConverter": Converter("qwen2_5_vl", {**_shards(), **_LORA_SHARDS}),
    "Qwen3VLMegatronConverter": Converter("qwen3_vl", _shards()),
    "InternVLConverter": Converter("internvl", _shards()),
    "Qwen3VLConverter": Converter(
        "qwen3_vl",
        {
            **_dcp(
                _QWEN3_VL,
                {**_TO, **_NAMES_OPTIONS, **_TIE, **_LORA_BASE},
                {**_BACK, **_NAMES_OPTIONS, **_TRUST, **_BF16},
            ),
            **_dcp_lora(_QWEN3_VL),
            **_NO_SHARDS,
        },
    ),
    "Mistral3Converter": Converter(
        "",
        {**_dcp(_MISTRAL3, {**_TO, **_TIE, **_LORA_BASE}, {**_BACK, **_TRUST, **_BF16}), **_dcp_lora(_MISTRAL3)},
        ("mistral3",),
    ),
    "Qwen35Converter": Converter(
        "",
        {
            **_dcp(
                _QWEN35,
                {**_TO, **_NAMES_OPTIONS, **_PAIRS, **_WORKERS},
                {
                    "dcp_dir": _DCP_DIR,
                    "save_hf_dir": _PATH("folder to write"),
                    "origin_hf_dir": _ASSETS,
                    **_NAMES_OPTIONS,
                    **_TRUST,
                    **_BF16,
                    "keep_origin_mtp_weights": Option("flag", "take heads for several tokens from the folder", False),
                },
            ),
            **_NO_SHARDS,
        },
        ("qwen3_5", "qwen3_5_moe"),
    ),
    "GenericDCPConverter": Converter(
        "",
        {
            **_dcp(
                Naming(),
                {**_TO, **_NAMES_OPTIONS, **_TIE, **_PAIRS, **_WORKERS},
                {**_BACK, **_NAMES_OPTIONS, **_TRUST, **_WORKERS},
            ),
            **_NO_SHARDS,
        },
    ),
    "ExpertMergeDcpConverter": Converter("", _EXPERTS),
    "moe_expert": Converter("", {"": _MOE_EXPERT}),
    "GlmConverter": _refused(
        "Tessera has no Megatron shards of GLM-4.1V: use its Hugging Face folder as model.path", *_THREE
    ),
    "DeepSeekVLConverter": _refused("DeepSeek-VL2 is not supported: convert with MindSpeed-MM itself", *_THREE),
    "VideoAlignConverter": _refused("VideoAlign is not supported: convert with MindSpeed-MM itself", *_THREE),
    "Qwen2_5_OmniConverter": Converter("qwen2_5_omni", _shards(hears=True)),
    **dict.fromkeys(("Qwen3TTSConverter", "MOSSTTSConverter"), _refused(_SOUND, "dcp_to_hf", "hf_to_dcp")),
    **VIDEO_CONVERTERS,
    "VACEConverter": _refused(_VIDEO, "hf_to_mm", "mm_to_hf", "hf_diffusers_to_mm", "mm_to_hf_diffusers"),
    "OpenSoraPlanConverter": _refused(_VIDEO, "hf_to_mm", "source_to_mm", "resplit", "vae_convert"),
    "LuminaConverter": _refused(_VIDEO, "hf_to_mm", "mm_to_hf"),
    "BagelConverter": _refused(_VIDEO, "hf_to_mm"),
    **dict.fromkeys(("OpenSoraConverter", "StepVideoConverter"), _refused(_VIDEO, "hf_to_mm", "source_to_mm")),
}
FOLDERS = (
    "hf_config.hf_dir",
    "hf_dir",
    "model_assets_dir",
    "origin_hf_dir",
    "base_hf_dir",
)  # options that name a folder with a config.json
