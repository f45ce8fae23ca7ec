"""Qwen3-Omni: the talker, which speaks the answers of a thinker, trained alone or with the thinker. Folders are those
of the full model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import experts, preset, quickstart_preset
from tessera.models.qwen3_omni import PRESETS as THINKERS
from tessera.models.qwen3_omni_talker.joint import OmniFamily


def _decoder(fields: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**fields["text"], **changes}


_EXPERTS = experts(128, 6, 384, shared_expert_intermediate_size=768)
_SMALL_EXPERTS = experts(4, 2, 96, shared_expert_intermediate_size=96)
_SMALL = quickstart_preset(head_dim=32, rope_theta=1e4, max_position_embeddings=4096)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "text": _decoder(_SMALL, vocab_size=80, mrope_section=(6, 5, 5), experts=_SMALL_EXPERTS),
        "depth": _decoder(_SMALL, vocab_size=64, num_hidden_layers=2),
        "thinker": THINKERS["quickstart"],
        "num_code_groups": 4,
        "accept_hidden_layer": 3,
        # Codes 64 to 69 of the first codebook are control codes; 70 and 71 select a voice.
        "codec_pad_id": 64,
        "codec_bos_id": 65,
        "codec_eos_token_id": 66,
        "codec_nothink_id": 67,
        "codec_think_bos_id": 68,
        "codec_think_eos_id": 69,
        "speaker_id": {"ethan": 70, "chelsie": 71},
        "im_start_token_id": 503,
        "im_end_token_id": 504,
        "tts_pad_token_id": 499,
        "tts_bos_token_id": 500,
        "tts_eos_token_id": 501,
        "system_token_id": 0,
        "user_token_id": 1,
        "assistant_token_id": 2,
    },
    "30b-a3b": {
        "text": _decoder(preset(3072, 1024, 2048, 20, (16, 2), head_dim=128, experts=_EXPERTS)),
        "depth": _decoder(preset(2048, 1024, 3072, 5, (16, 8), head_dim=128)),
        "thinker": THINKERS["30b-a3b"],
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    },
}
SPEC = OmniFamily().spec(PRESETS)
