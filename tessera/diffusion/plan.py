"""Declare how generation transformers are split over devices: tensor-parallel styles and parts of pipeline stages.

All families use the same module names, so they share one table of styles. A pattern in the table may match no
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.nn.stage_carry import CARRY

BOTH = "{weight,bias}"
_BLOCKS = ("blocks.{*}", "single_blocks.{*}", "embed.text.blocks.{*}")  # the last pattern: blocks of the text refiner
_COLUMNS = (
    *("qkv.{q,k,v}", "attn.qkv.{q,k,v}", "attn.{latent,text}.{q,k,v}", "attn2.latent.{q,k,v}"),
    *("cross.q", "cross.{kv,image_kv}.{k,v}", "proj.{q,k,v,up}", "{mlp,latent_mlp,text_mlp}.up"),
)
_ROWS = (
    *("out", "attn.out", "attn.{latent_out,text_out}", "attn2.latent_out", "cross.out"),
    "{mlp,latent_mlp,text_mlp}.down",
)
_MODULATIONS = "{modulation,latent_modulation,text_modulation,attn_modulation,mlp_modulation}"
_EMBEDDINGS = (
    *("{latents,patch,modulation,text,text_norm,table}", "{time,pooled,guidance,text}.{up,down}"),
    *("text.embed", "text.{time,pooled}.{up,down}"),  # layers of the text refiner
)
# Modules whose output features are grouped by attention heads.
_HEADS = (
    *("qkv", "attn.qkv", "attn.{latent,text}", "attn2.latent", "cross.kv", "cross.image_kv", "proj"),
    *("qkv.{q,k,v}", "attn.qkv.{q,k,v}", "attn.{latent,text}.{q,k,v}", "attn2.latent.{q,k,v}"),
    *("cross.q", "cross.{kv,image_kv}.{k,v}", "proj.{q,k,v}"),
)


def _block_styles(path: str) -> dict[str, TensorStyle]:
    styles: dict[str, TensorStyle] = {
        f"{path}.{_MODULATIONS}.{BOTH}": "replicate",
        f"{path}.modulation.table": "replicate",
        f"{path}.{{attn_norm,mlp_norm,cross_norm}}.{BOTH}": "replicate",
        f"{path}.attn.{{q_norm,k_norm}}.{BOTH}": "features",
        f"{path}.cross.{{q_norm,k_norm,image_norm}}.weight": "features",
        f"{path}.attn.{{latent_norm,text_norm}}.{{q,k}}.weight": "heads",
        f"{path}.attn2.latent_norm.{{q,k}}.weight": "heads",
        f"{path}.norm.{{q,k}}.weight": "heads",
    }
    styles |= {f"{path}.{name}.{BOTH}": "column" for name in _COLUMNS}
    styles |= {f"{path}.{name}.weight": "row" for name in _ROWS}
    return styles | {f"{path}.{name}.bias": "replicate" for name in _ROWS}


STYLES: Mapping[str, TensorStyle] = {
    **{f"embed.{name}.{BOTH}": "replicate" for name in _EMBEDDINGS},
    **{pattern: style for path in _BLOCKS for pattern, style in _block_styles(path).items()},
    f"head.{{modulation,proj}}.{BOTH}": "replicate",
    "head.modulation.table": "replicate",
}


def generation_plan(
    stream: Stream,
    width: int,
    heads: int,
    units: Mapping[str, float],
    *,
    attention: Sequence[str] = ("blocks.{*}.attn.core",),
    styles: Mapping[str, TensorStyle] | None = None,
    without_heads: Sequence[str] = (),
    **more: Any,
) -> ModelPlan:
    """Return the parallel plan of a transformer with embeddings, blocks and a head.

    `stream`: the main sequence. `units`: costs of the embeddings, of a block of each kind and of the head, relative to
    one block. `attention`: modules that compute attention. `styles`: extend or replace entries of `STYLES`.
    `without_heads`: modules of a block that are not split by heads. `more`: further fields of `ModelPlan`.
    """
    carry = StageActivation(CARRY, width)
    blocks = tuple(path for path in units if path in _BLOCKS)
    return ModelPlan(
        blocks=blocks,
        tensor={**STYLES, **(styles or {})},
        units=tuple(
            PipelineUnit(path, cost, "latents", carry) if path in blocks else PipelineUnit(path, cost)
            for path, cost in units.items()
        ),
        streams={"latents": stream},
        attention=tuple(attention),
        heads={f"{path}.{name}": heads for path in _BLOCKS for name in _HEADS if name not in without_heads},
        **more,
    )
