"""Read the config.json of an original checkpoint of Wan as that of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tessera.diffusion.wan.config import WanConfig
from tessera.errors import TesseraError
from tessera.models.text.hf import check_supported
from tessera.weights.layouts import folder_layout

MODEL_TYPES = ("t2v", "i2v", "flf2v", "ti2v")
_IMAGE_WIDTH = 1280  # of CLIP's embeddings, two images of 257 with positions where there is a last frame
_FIELDS = {
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "text_dim": "text_dim",
    "eps": "eps",
    "patch_size": "patch_size",
    "cross_attn_norm": "cross_attn_norm",
}


def hf_config(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the diffusers form of an original checkpoint."""
    where = f"config.json ({data.get('model_type')})"
    check_supported(
        [
            ("_class_name", data.get("_class_name", "WanModel"), ("WanModel",)),
            ("text_len", data.get("text_len", 512), (512,)),
            ("qk_norm", data.get("qk_norm", True), (True,)),
            ("window_size", list(data.get("window_size", (-1, -1))), ([-1, -1],)),
        ],
        where,
    )
    width, heads = data.get("dim", 2048), data.get("num_heads", 16)
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0):
        raise TesseraError(
            f"dim {width!r} does not split into num_heads {heads!r}",
            where=where,
            code="model.heads-do-not-divide-width",
        )
    fields = {new: data[old] for old, new in _FIELDS.items() if old in data}
    defaults = {"num_attention_heads": 16, "num_layers": 32, "ffn_dim": 8192}
    # Wan 2.2 reads a first frame as channels only. Whether a model also reads embeddings shows in its weights only.
    if data.get("model_type") in ("i2v", "flf2v") and (names := _stored_names(folder)) & {"img_emb.proj.1.weight"}:
        fields |= {"image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": width}
        if "img_emb.emb_pos" in names:
            fields["pos_embed_seq_len"] = 514
    return {"_class_name": WanConfig.class_name, **defaults, **fields, "attention_head_dim": width // heads}


def _stored_names(folder: Path) -> set[str]:
    """Return the names of the weights that a folder stores."""
    names: set[str] = set()
    for path in folder_layout(folder).weight_files():
        try:
            with safe_open(path, "pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise TesseraError(
                f"not a safetensors file: {error}", where=str(path), code="weights.not-safetensors"
            ) from error
    return names
