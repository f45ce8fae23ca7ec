"""One question to a model that lies in a folder: what `tessera generate` does, from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tessera.infer.load import load


def generate(
    model: str | Path,
    question: str,
    *,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | torch.device = "auto",
    trust: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The model's answer. `on_text` gets it piece by piece as it grows. To ask more than once, `tessera.load` the model
    once. `trust`: as for that."""
    loaded, processor = load(model, device=device, trust=trust)
    parts: list[dict[str, Any]] = [{"type": "image", "image": str(path)} for path in images]
    parts += [{"type": "video", "video": str(path)} for path in videos]
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
    answer = loaded.generate(
        processor(messages),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        on_text=on_text,
    )
    assert isinstance(answer, str), "one question has one answer"
    return answer
