"""List every vision-language family that is compared with transformers. A new one adds a cases module and one line."""

from __future__ import annotations

from glm4v_cases import Glm4v
from internvl_cases import InternVL
from llava_cases import Llava
from qwen2_5_omni_cases import Qwen25Omni
from qwen2_5_vl_cases import Qwen25VL
from qwen2_vl_cases import Qwen2VL
from qwen3_omni_cases import Qwen3Omni
from qwen3_vl_cases import Qwen3VL
from vision_language import VisionLanguageFamily

VISION_LANGUAGE: dict[str, VisionLanguageFamily] = {
    family.spec.name: family
    for family in (Glm4v(), InternVL(), Llava(), Qwen2VL(), Qwen25Omni(), Qwen25VL(), Qwen3Omni(), Qwen3VL())
}
