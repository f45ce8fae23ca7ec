"""A class of `transformers` adapted the MindSpeed-MM way: by a mixin that lets it say how it is sharded."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3ForCausalLM

from tessera_compat.mindspeed_mm.fsdp2 import set_fullyshard_modules_to_wrap
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin


class AdaptedQwen3(Qwen3ForCausalLM, FSDP2Mixin):
    def _fully_shard(self, fsdp2_kwargs: Any, fsdp2_config: Any) -> None:
        set_fullyshard_modules_to_wrap(self, ["model.layers.1"], **fsdp2_kwargs)
