"""What is known of single classes of transformers, by the `model_type` of their config.json.

A class that is not listed here is trained all the same: one sample to a row, with padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Several samples may share a row: a class that gets positions which begin anew, and no mask, lets no sample see
# another. Both halves must do so, what joins images and text and the model of text. Each of these was compared with
# samples in rows of their own.
_PACKS_IMAGES = frozenset(
    ("aya_vision", "deepseek_vl", "gemma3", "idefics2", "idefics3", "janus", "llava_next", "ovis2", "vipllava")
)
_PACKS_TEXT = frozenset(("cohere2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"))
# `token_type_ids` tell the prompt (0), which is read in both directions, from what follows it.
_PREFIX_TYPES = frozenset(("paligemma",))


def packs(config: Mapping[str, Any], text_type: str) -> bool:
    """Return whether several samples may share a row. `text_type`: the model_type of the model of text."""
    kind = str(config.get("model_type"))
    return text_type in _PACKS_TEXT and (kind in _PACKS_IMAGES or kind == text_type)


def has_prefix_types(config: Mapping[str, Any]) -> bool:
    """Return whether `token_type_ids` have to say where the prompt ends."""
    return str(config.get("model_type")) in _PREFIX_TYPES
