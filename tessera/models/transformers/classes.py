"""What is known of single classes of transformers, by the `model_type` of their config.json.

A class that is not listed here is trained all the same: one sample to a row, with padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Several samples may share a row: a class that gets positions which begin anew, and no mask, lets no sample see
# another. Both halves must do so, what joins images and text and the model of text. Each of these was compared with
# samples in rows of their own.
_PACKS_IMAGES = frozenset(
    ("aya_vision", "deepseek_vl", "gemma3", "idefics2", "idefics3", "janus", "llava_next", "ovis2", "vipllava")
)
_PACKS_TEXT = frozenset(("cohere2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"))
_IMAGES_READ_BOTH_WAYS = frozenset(("gemma3",))  # tokens of an image see each other, also those that follow
# `token_type_ids` tell the prompt (0), which is read in both directions, from what follows it.
_PREFIX_TYPES = frozenset(("paligemma",))


def packs(config: Mapping[str, Any], text_type: str) -> bool:
    """Return whether several samples may share a row. `text_type`: the model_type of the model of text."""
    kind = str(config.get("model_type"))
    listed = text_type in _PACKS_TEXT and (kind in _PACKS_IMAGES or kind == text_type)
    return listed and _masks_stay_apart(kind in _IMAGES_READ_BOTH_WAYS)


@cache
def _masks_stay_apart(image_blocks: bool) -> bool:
    """Return whether the installed transformers masks a packed row as it masks the row's samples alone.

    transformers 5.23 reads a class's own blocks (`image_blocks`) at positions of the sample instead of places in the
    row, so the blocks of the first sample are applied to all samples.
    """
    from transformers import PretrainedConfig
    from transformers.masking_utils import blockwise_overlay, create_causal_mask

    settings = PretrainedConfig(attn_implementation="eager")
    blocks = torch.tensor([[-1, -1, -1, -1, 0, 0]])  # the second sample of the row has an image of two tokens
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])

    def visible(start: int, end: int) -> Tensor:
        """Return the mask of tokens `start` to `end`: [tokens, tokens], true where a token sees another."""
        overlay = blockwise_overlay(blocks[:, start:end]) if image_blocks else None
        states = torch.zeros(1, end - start, 1)
        mask = create_causal_mask(settings, states, None, None, positions[:, start:end], or_mask_function=overlay)
        assert isinstance(mask, Tensor), "eager attention always has a mask"
        return mask[0, 0] == 0

    alone = torch.block_diag(visible(0, 3), visible(3, 6)).bool()  # type: ignore[no-untyped-call]
    return torch.equal(visible(0, 6), alone)


def has_prefix_types(config: Mapping[str, Any]) -> bool:
    """Return whether `token_type_ids` have to say where the prompt ends."""
    return str(config.get("model_type")) in _PREFIX_TYPES
