"""A class of `transformers` adapted the MindSpeed-MM way: by a mixin that lets it say how it is sharded."""

from __future__ import annotations

from transformers import Qwen3ForCausalLM

from tessera.parallel.mixin import FSDP2Mixin


class AdaptedQwen3(Qwen3ForCausalLM, FSDP2Mixin):
    def _fully_shard(self, fsdp2_kwargs: object = None, fsdp2_config: object = None) -> None:
        self.set_fullyshard_modules_to_wrap([self.model.layers[1]])
