"""CSM: speech from text in the voices of a conversation, as codes of the codec Mimi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.csm.model import CSM
from tessera.models.family import preset, quickstart_preset


def _scaled(length: int) -> dict[str, Any]:
    """Return rotary embeddings as in Llama 3.2. The frequency factors are proportional to the original `length`."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": length}
    factors = {"low_freq_factor": length / 8192, "high_freq_factor": length / 2048}
    return {"rope_theta": 5e5, "rope_scaling": {**scaling, **factors}, "rms_norm_eps": 1e-5}


_TEXT: Mapping[str, Any] = {"max_position_embeddings": 2048, "bos_token_id": 128000, "pad_token_id": 128002}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Token 508 begins a text, 509 ends it. 510 is a frame of speech, 511 its end.
    "quickstart": {
        "text": quickstart_preset(bos_token_id=508, pad_token_id=510)["text"],
        "depth": preset(67, 64, 192, 2, (2, 1), initializer_range=0.06)["text"],
        "num_codebooks": 8,
        "audio_token_id": 510,
        "audio_eos_token_id": 511,
        "codebook_pad_token_id": 66,
    },
    "1b": {
        "text": preset(128256, 2048, 8192, 16, (32, 8), **_TEXT, **_scaled(1024))["text"],
        "depth": preset(2051, 1024, 8192, 4, (8, 2), max_position_embeddings=33, **_scaled(16))["text"],
    },
}
SPEC = CSM().spec(PRESETS)
