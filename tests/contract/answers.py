"""Folders that we export, and what models answer from them here and in transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import randomize

import tessera
from tessera.checkpoint.state import model_tensors
from tessera.core.batch import Batch
from tessera.core.spec import ModelSpec
from tests.toys.engine_models import new_tokens
from tests.toys.save_folder import save_folder


def export(spec: ModelSpec, config: Any, processor: Any, folder: Path, seed: int = 0) -> Path:
    """A folder of random weights, large enough that answers vary."""
    module = spec.main.build(config)
    randomize(module, seed, 0.3)
    save_folder(folder, model_tensors(module), spec.main.weight_map(config), config.to_hf(), finish=processor.save)
    return folder


@lru_cache(maxsize=1)  # questions to one folder come one after another
def _both(folder: Path, **processor: Any) -> tuple[Any, Any]:
    """The folder as we load it and as transformers loads it. Answering changes neither."""
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return tessera.load(folder, device="cpu", processor=processor), reference.eval()


def same_answer(
    folder: Path,
    question: list[dict[str, Any]],
    inputs: Callable[[Any, Batch], dict[str, Any]],
    new: int = 12,
    **options: Any,
) -> None:
    """`inputs`: of transformers' model, given it and our prompt. `options`: of our processor."""
    (model, loaded), reference = _both(folder, **options)
    batch, processor = loaded(question), loaded.processor
    stops = processor.stop_tokens
    ours = new_tokens(model.module, batch, new, stops)[0]
    prompt = {"input_ids": batch["tokens"][None], "attention_mask": torch.ones_like(batch["tokens"])[None]}
    out = reference.generate(
        **{**prompt, **inputs(reference, batch)}, max_new_tokens=new, do_sample=False, eos_token_id=list(stops)
    )
    theirs = [token for token in out[0, batch["tokens"].numel() :].tolist() if token not in stops]
    assert ours == theirs
    assert len(set(ours)) > 2  # it says something
    assert model.generate(batch, max_new_tokens=new) == processor.decode(theirs)
