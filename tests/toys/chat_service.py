"""A processor of Qwen2-VL with a small vocabulary, and a server's service around a fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tessera.checkpoint.state import model_tensors
from tessera.data.media.files import Limits
from tessera.inference.loaded import LoadedProcessor
from tessera.inference.prepare import PromptPool
from tessera.models.processing.chat import ChatTemplate
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.models.qwen2_vl import SPEC
from tessera.server.metrics import Metrics
from tessera.server.service import Service
from tessera.server.settings import Settings
from tessera.server.tokens import Tokens
from tests.toys.fake_engine import FakeEngine
from tests.toys.save_folder import save_folder

VOCABULARY = 300
WORDS = (*ChatTemplate().special_words(), "<|endoftext|>")


def settings() -> dict[str, Any]:
    """Return the configuration of a model with 300 tokens."""
    template = ChatTemplate()
    ids = {word: VOCABULARY - len(WORDS) + number for number, word in enumerate(WORDS)}
    return {
        "text": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "mrope_section": [2, 1, 1],
            "bos_token_id": None,
            "eos_token_id": ids[template.stop_words[0]],
        },
        "vision": {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4},
        "tie_word_embeddings": True,
        "image_token_id": ids[template.media["image"].word],
        "video_token_id": ids[template.media["video"].word],
        "vision_start_token_id": ids[template.media["image"].before],
        "vision_end_token_id": ids[template.media["image"].after],
    }


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(["what is in this picture", "a cat"], VOCABULARY, WORDS).save(str(folder / "tokenizer.json"))
    return folder


def make_processor(folder: Path) -> LoadedProcessor:
    """Return a processor whose tokenizer is written to `folder`."""
    assert SPEC.processor is not None
    config = SPEC.config.model_validate(settings())
    processor = SPEC.processor(config, write_tokenizer(folder), min_pixels=64, max_pixels=4096)
    return LoadedProcessor(processor, SPEC, Limits())


def make_service(processor: LoadedProcessor, engine: FakeEngine | None = None, **options: Any) -> Service:
    """Return a service with a fake engine. `options`: as of `Settings`."""
    inner: Any = processor.processor
    tokens = Tokens(inner)
    engine = engine or FakeEngine(tokens.encode, inner.decode)
    limits = Settings(**{"name": "toy", "max_length": 256, **options})
    return Service(limits, engine, PromptPool(processor, workers=0), tokens, Metrics())


def write_model(folder: Path, layers: float = 1.0) -> Path:
    """Write a Hugging Face folder of a model with random weights. `layers` 4: its answers depend on the questions."""
    assert SPEC.processor is not None
    config = SPEC.config.model_validate(settings())
    processor = SPEC.processor(config, write_tokenizer(folder.with_name("words")), min_pixels=64, max_pixels=4096)
    torch.manual_seed(0)
    module = SPEC.main.build(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
        if layers != 1.0:
            for path, parameter in module.named_parameters():
                if "norm" in path:
                    parameter.fill_(1.0)
                elif "embed" not in path:
                    parameter.mul_(layers)
    save_folder(folder, model_tensors(module), SPEC.main.weight_map(config), config.to_hf(), finish=processor.save)
    return folder
