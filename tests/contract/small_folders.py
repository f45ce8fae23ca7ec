"""A small export of every family with a preset, with a tokenizer whose ids the model takes as its own."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from parity import randomize

from tessera.config.run_config import ModelSection
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera.models.glm4v.processor import GLM4V
from tessera.models.internvl.processor import QWEN
from tessera.models.llama import LLAMA3
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.models.qwen2_5_omni.processor import OMNI
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_omni.processor import QWEN3_OMNI

VOCAB = 512
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SEEN = [*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
OMNI_IDS = dict(Qwen25OmniConfig.token_fields)
OMNI3_IDS = dict(Qwen3OmniConfig.token_fields)
# By a name of the case: family, preset, special words, and which of them the model knows by an id.
CASES: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "qwen2_vl": ("qwen2_vl", "quickstart", SEEN, QWEN_IDS),
    "qwen2_5_vl": ("qwen2_5_vl", "quickstart", SEEN, QWEN_IDS),
    "qwen2_5_omni": ("qwen2_5_omni", "quickstart", ["<|endoftext|>", *OMNI.special_words()], OMNI_IDS),
    "qwen3_omni": ("qwen3_omni", "quickstart", ["<|endoftext|>", *QWEN3_OMNI.special_words()], OMNI3_IDS),
    "qwen3_vl": ("qwen3_vl", "quickstart", SEEN, QWEN_IDS),
    "qwen3_vl experts": ("qwen3_vl", "quickstart-moe", SEEN, QWEN_IDS),
    "glm4v": ("glm4v", "quickstart", ["<|endoftext|>", "</answer>", *GLM4V.special_words()], GLM_IDS),
    "internvl": (
        "internvl",
        "quickstart",
        ["<|endoftext|>", *QWEN.special, "<IMG_CONTEXT>", "<video>"],
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "llava one vision": (
        "llava",
        "quickstart",
        [*CHATML, "<image>", "<video>"],
        {"image_token_id": "<image>", "video_token_id": "<video>"},
    ),
    "llava 1.5": ("llava", "quickstart-1.5", ["<unk>", "<s>", "</s>", "<image>"], {"image_token_id": "<image>"}),
    "qwen2": ("qwen2", "quickstart", CHATML, {}),
    "qwen3": ("qwen3", "quickstart", CHATML, {}),
    "qwen3 experts": ("qwen3", "quickstart-moe", CHATML, {}),
    "llama": ("llama", "quickstart", ["<|end_of_text|>", *LLAMA3.special], {}),
}
LANGUAGE = [name for name, case in CASES.items() if not case[3]]


_EXPORTS = tempfile.TemporaryDirectory()  # removed when the process ends


def small_folder(name: str, root: Path) -> Path:
    """Write the export to `root / "hf"`, and its tokenizer beside it. A process builds each export once."""
    shutil.copytree(_export(name), root, dirs_exist_ok=True)
    return root / "hf"


@cache
def _export(name: str) -> Path:
    family, preset, words, named = CASES[name]
    tokenizer = train_tokenizer(["Say red blue tall small old."], VOCAB, words)
    root = Path(_EXPORTS.name) / name
    root.mkdir()
    tokenizer.save(str(root / "tokenizer.json"))
    ids: dict[str, Any] = {field: tokenizer.token_to_id(word) for field, word in named.items()}
    spec, config = resolve(ModelSection(family=family, preset=preset, config=ids))
    assert spec.processor is not None
    bounds = (
        {"min_pixels": 1024, "max_pixels": 4096}
        if family in ("glm4v", "qwen2_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen3_vl")
        else {}
    )
    module = spec.main.build(config)
    randomize(module, 0, 0.3)  # large enough that answers vary
    export_folder(module, spec, config, spec.processor(config, root, **bounds), root / "hf", files=root, prove="never")
    return root
