"""List every processor that is compared with transformers. A new one adds a class and one line."""

from __future__ import annotations

from grid_processors import Glm4vCase, Qwen2VLCase, Qwen3OmniCase, Qwen3VLCase, Qwen25OmniCase, Qwen25VLCase
from processors import ProcessorCase
from tile_processors import InternVLCase, LlavaCase, OneVisionCase

PROCESSORS: dict[str, ProcessorCase] = {
    "glm4v": Glm4vCase(),
    "internvl": InternVLCase(),
    "llava": LlavaCase(),
    "llava_onevision": OneVisionCase(),
    "qwen2_5_omni": Qwen25OmniCase(),
    "qwen2_5_vl": Qwen25VLCase(),
    "qwen2_vl": Qwen2VLCase(),
    "qwen3_omni": Qwen3OmniCase(),
    "qwen3_vl": Qwen3VLCase(),
}
