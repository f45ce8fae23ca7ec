"""Every family that sees and is compared with transformers. A new one writes its cases module and adds one line."""

from __future__ import annotations

from glm4v_cases import Glm4v
from internvl_cases import InternVL
from llava_cases import Llava
from qwen2_5_vl_cases import Qwen25VL
from qwen2_vl_cases import Qwen2VL
from qwen3_vl_cases import Qwen3VL
from seeing import Seeing

SEEING: dict[str, Seeing] = {
    family.spec.name: family for family in (Glm4v(), InternVL(), Llava(), Qwen2VL(), Qwen25VL(), Qwen3VL())
}
