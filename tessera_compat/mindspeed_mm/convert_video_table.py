"""The converters of `mm-convert` for models of video generation, their methods and options."""

from __future__ import annotations

import functools

from tessera_compat.mindspeed_mm import convert_video
from tessera_compat.mindspeed_mm.convert_options import Converter, Method, Option

_PATH = functools.partial(Option, "path", required=True)
_DIVIDED = {
    "target_parallel_config.pp_layers": Option(
        "stages", "blocks on each pipeline rank; a list of lists: virtual stages"
    ),
    "target_parallel_config.tp_size": Option("size", "tensor ranks", 1),
    "target_parallel_config.ep_size": Option("size", "expert ranks", 1),
}
_SOURCE, _TARGET_PATH = _PATH("what to read"), _PATH("folder to write")
_TWO = {"source_path": _SOURCE, "target_path": _TARGET_PATH}
_DIT = {
    "hf_to_mm": Method(
        "Divide the transformer of a diffusers folder as a job loads it.",
        convert_video.hf_to_mm,
        {**_TWO, **_DIVIDED},
    ),
    "mm_to_hf": Method(
        "Join shards of a job, or export its run, to a diffusers transformer.",
        convert_video.mm_to_hf,
        {**_TWO, "hf_dir": _PATH("transformer of the diffusers folder that the job began from")},
    ),
    "resplit": Method("Divide shards anew.", convert_video.resplit_mm, {**_TWO, **_DIVIDED}),
    "merge_lora_to_base": Method(
        "Merge adapters of a job into the shards that it began from.",
        convert_video.merge_lora,
        {
            **_TWO,
            "lora_path": _PATH("shards of the adapters"),
            **_DIVIDED,
            "lora_rank": Option("size", "rank of the adapters", 8),
            "lora_alpha": Option("number", "alpha of the adapters", 16),
            "use_npu": Option("flag", "accepted; products of adapters are computed on the host", True),
        },
        plain=("lora_rank", "lora_alpha", "use_npu"),
    ),
}
_LEFT_OUT = {
    "layerzero_to_mm": "LayerZeRO writes pickled pieces of flattened weights: convert them with MindSpeed-MM; "
    "Tessera shards jobs by --use-torch-fsdp2 or --use-distributed-optimizer, and their runs need no conversion",
    "mm_to_dcp": "jobs read shards and diffusers folders directly; GenericDCPConverter hf_to_dcp writes a DCP folder",
    "lora_hf_to_mm": "adapters of diffusers and PEFT are read directly: model.lora.path in a recipe",
    "t2v_text_encoder": "the diffusers folder of HunyuanVideo has its language model as text_encoder",
}


def _left_out(*names: str) -> dict[str, Method]:
    return {name: Method("(not supported)", refused=_LEFT_OUT[name]) for name in names}


def _source(family: str) -> Method:
    about = "Shard an original checkpoint (.pt or .safetensors) as a job loads it."
    return Method(about, convert_video.SOURCES[family], {**_TWO, **_DIVIDED})


VIDEO_CONVERTERS = {
    "WanConverter": Converter(
        "wan",
        {
            "hf_to_mm": _DIT["hf_to_mm"],
            "mm_to_hf": _DIT["mm_to_hf"],
            "resplit": _DIT["resplit"],
            "merge_lora_to_base": _DIT["merge_lora_to_base"],
            **_left_out("lora_hf_to_mm", "layerzero_to_mm", "mm_to_dcp"),
        },
    ),
    "HunyuanVideoConverter": Converter(
        "hunyuan_video",
        {
            "source_to_mm": _source("hunyuan_video"),
            "hf_to_mm": _DIT["hf_to_mm"],
            "mm_to_hf": _DIT["mm_to_hf"],
            "resplit": _DIT["resplit"],
            "merge_lora_to_base": _DIT["merge_lora_to_base"],
            **_left_out("layerzero_to_mm", "t2v_text_encoder"),
        },
        options={"version": Option("text", default="t2v", choices=("t2v", "i2v", "t2v-lora", "i2v-lora"))},
    ),
    "CogVideoConverter": Converter(
        "cogvideox",
        {
            "source_to_mm": _source("cogvideox"),
            "hf_to_mm": _DIT["hf_to_mm"],
            "mm_to_hf": _DIT["mm_to_hf"],
            "resplit": _DIT["resplit"],
            "merge_lora_to_base": _DIT["merge_lora_to_base"],
            **_left_out("layerzero_to_mm"),
        },
        options={
            "version": Option("text", default="t2v", choices=("t2v", "i2v")),
            "remove_pos_emb": Option("flag", "drop position embedding tables", False),
        },
    ),
}
