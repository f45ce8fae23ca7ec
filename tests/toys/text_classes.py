"""Tiny random folders of text classes of transformers, with a tokenizer and a chat template, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.toys.vision_classes import CHATML, LLAMA, TEXTS, VOCABULARY

SIZES = {key: value for key, value in LLAMA.items() if key != "model_type"}


def tokenizer() -> Any:
    import transformers

    from tessera.models.processing.tokenizer import train_tokenizer

    words = ["<pad>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(TEXTS, VOCABULARY, words),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=CHATML.replace("IMAGE", "<image>"),
    )


def write_text_class(model: str, fields: dict[str, Any], folder: Path) -> Path:
    """Write the folder of a class, such as LlamaForCausalLM, as the library saves it."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind, words = getattr(transformers, model), tokenizer()
    ids = {name: getattr(words, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = kind(kind.config_class(**ids, **fields))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: those are alike in every fresh model
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_text_chats(file: Path, count: int = 6) -> Path:
    """Write conversations of several lengths; the last one is the longest."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is number {number}? " + "Be brief. " * number},
                {"role": "assistant", "content": "red " * (1 + number)},
            ]
        }
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
