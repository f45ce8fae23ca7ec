"""Qwen2-VL: images and videos of any size, with text positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import preset, quickstart_preset
from tessera.models.qwen2_vl.model import Qwen2VL


def quickstart(vision: Mapping[str, Any], **text: Any) -> dict[str, Any]:
    """Return the quick-start preset of a Qwen-VL family."""
    # Token 504 is end-of-text and padding. 505 begins and 506 ends a message. The order is that of published models.
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 506, "pad_token_id": 504}
    return {
        **quickstart_preset(rope_theta=1e4, max_position_embeddings=4096, **ends, **text),
        "vision": vision,
        "vision_start_token_id": 507,
        "vision_end_token_id": 508,
        "image_token_id": 509,
        "video_token_id": 510,
    }


_TOWER = {"depth": 3, "embed_dim": 96, "num_heads": 4, "mlp_ratio": 4, "patch_size": 7}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": quickstart(_TOWER, mrope_section=(4, 6, 6)),
    "2b": preset(151936, 1536, 8960, 28, (12, 2), tied=True),
    "7b": preset(152064, 3584, 18944, 28, (28, 4)),
    "72b": preset(152064, 8192, 29568, 80, (64, 8)),
}
SPEC = Qwen2VL().spec(PRESETS)
