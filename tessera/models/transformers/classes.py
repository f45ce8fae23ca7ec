"""Lists of transformers classes that can be packed or need `token_type_ids`, by `model_type` in config.json.

Classes that are not listed are trained with one padded sample per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Model types whose rows may contain several samples: without a mask, transformers separates samples where
# `position_ids` start again at 0. The model_type of the full class and of its text decoder must both be listed. A test
# compares the outputs of each with those of samples in separate rows.
_PACKS_IMAGES = frozenset(
    ("aya_vision", "deepseek_vl", "gemma3", "idefics2", "idefics3", "janus", "llava_next", "ovis2", "vipllava")
)
_PACKS_TEXT = frozenset(("cohere2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"))
# classes in which the tokens of an image attend to each other in both directions
_IMAGES_READ_BOTH_WAYS = frozenset(("gemma3",))
# Classes with bidirectional attention in the prompt: `token_type_ids` are 0 in the prompt and 1 after it.
_PREFIX_TYPES = frozenset(("paligemma",))


def packs(config: Mapping[str, Any], text_type: str) -> bool:
    """Return whether several samples may share a row. `text_type`: model_type of the text decoder."""
    kind = str(config.get("model_type"))
    listed = text_type in _PACKS_TEXT and (kind in _PACKS_IMAGES or kind == text_type)
    return listed and _masks_stay_apart(kind in _IMAGES_READ_BOTH_WAYS)


@cache
def _masks_stay_apart(image_blocks: bool) -> bool:
    """Return whether the masks of the installed transformers keep the samples of a packed row apart.

    `image_blocks`: check masks with bidirectional attention inside images. transformers 5.23 looks up images by the
    position in a sample instead of the index in the row, so all samples get the images of the first sample.
    """
    from transformers import PretrainedConfig
    from transformers.masking_utils import blockwise_overlay, create_causal_mask

    settings = PretrainedConfig(attn_implementation="eager")
    # image index of each token: the second sample of the row has an image of two tokens
    blocks = torch.tensor([[-1, -1, -1, -1, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])

    def visible(start: int, end: int) -> Tensor:
        """Return the attention mask among tokens `start` to `end`: true where token i (row) attends to token j."""
        overlay = blockwise_overlay(blocks[:, start:end]) if image_blocks else None
        states = torch.zeros(1, end - start, 1)
        mask = create_causal_mask(settings, states, None, None, positions[:, start:end], or_mask_function=overlay)
        assert isinstance(mask, Tensor), "eager attention always has a mask"
        return mask[0, 0] == 0

    alone = torch.block_diag(visible(0, 3), visible(3, 6)).bool()  # type: ignore[no-untyped-call]
    return torch.equal(visible(0, 6), alone)


def has_prefix_types(config: Mapping[str, Any]) -> bool:
    """Return whether the class needs `token_type_ids` that mark the end of the prompt."""
    return str(config.get("model_type")) in _PREFIX_TYPES
