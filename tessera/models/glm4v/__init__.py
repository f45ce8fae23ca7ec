"""GLM-4.1V: images of any size, and videos with the time of their frames written as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_VISION, preset, quickstart_preset
from tessera.models.glm4v.model import Glm4v

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            rope_theta=1e4,
            mrope_section=(2, 3, 3),
            max_position_embeddings=4096,
            eos_token_id=(499, 503, 505),
            pad_token_id=499,
        ),
        "vision": {**QUICKSTART_VISION, "patch_size": 7, "image_size": 84},
        # Token 499 is end-of-text and padding. 500 to 505 begin a conversation and its turns, as in published models.
        "image_start_token_id": 506,
        "image_end_token_id": 507,
        "video_start_token_id": 508,
        "video_end_token_id": 509,
        "image_token_id": 510,
        "video_token_id": 511,
    },
    "9b": preset(151552, 4096, 13696, 40, (32, 2), max_position_embeddings=65536),
}
SPEC = Glm4v().spec(PRESETS)
