"""Speed of training the thinker of Qwen2.5-Omni on one accelerator: Tessera through its Trainer, and `transformers`.

    python bench/omni.py                                # both, 7B in bfloat16 with recompute, one JSON line each
    python bench/omni.py --preset quickstart --device cpu --length 1024 --minutes 0.4   # a try on a CPU

Both read one row: 4 minutes of sound and 2 pictures of 56 x 56 patches, filled up with text to 8,192 tokens. Batches
are made beforehand on both sides, because the machine of this bench has no decoder of sound. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vlm
from conversations import apart
from PIL import Image

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.core.step_source import StepSource
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer

FAMILY, RATE = "qwen2_5_omni", 16_000
WORDS = ("endoftext", "im_start", "im_end", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
WORDS += ("IMAGE", "VIDEO", "AUDIO")
TOKEN_FIELDS = ("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id")
TOKEN_FIELDS += ("image_token_index", "video_token_index", "audio_token_index")
PICTURES = 2
LAYERS = ["text.layers.{*}", "vision.blocks.{*}", "audio.blocks.{*}"]
BF16 = {"weights": "bfloat16", "reduce": "bfloat16"}


class SameRow(StepSource):
    """Give one batch at every step, copied to the device each time."""

    def __init__(self, batch: Batch, device: str) -> None:
        self.batch, self.device = (batch.pin_memory() if device == "cuda" else batch), device

    def start(self, step: int, row: int) -> None:
        pass

    def next_step(self) -> list[Batch]:
        return [self.batch.to(self.device, non_blocking=True)]


def model_section(preset: str, folder: Path) -> dict[str, Any]:
    if preset == "quickstart":  # its tokens are those of its own vocabulary
        return {"family": FAMILY, "preset": preset, "tokenizer": str(folder)}
    vocabulary = 152064 if preset == "7b" else 151936
    first = vocabulary - len(WORDS)
    ids = {name: first + 3 + number for number, name in enumerate(TOKEN_FIELDS)}
    text = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": first + 2, "pad_token_id": first}
    return {"family": FAMILY, "preset": preset, "tokenizer": str(folder), "config": {**ids, "text": text}}


def vocabulary_of(preset: str) -> int:
    return {"quickstart": 512, "3b": 151936, "7b": 152064}[preset]


def write_tokenizer(folder: Path, preset: str) -> None:
    tokenizer = train_tokenizer(["a"], vocabulary_of(preset), [f"<|{word}|>" for word in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))


def row(length: int, minutes: float, side: int, processor: Any) -> Any:
    """Return the encoded row."""
    chance = np.random.default_rng(0)
    sound = (chance.standard_normal(int(minutes * 60 * RATE)) * 0.1).astype(np.float32)
    pixels = chance.integers(0, 255, (PICTURES, side, side, 3), dtype=np.uint8)
    pictures = [Image.fromarray(array) for array in pixels]
    media: list[Any] = [*pictures, sound]

    def encoded(letters: int) -> Any:
        answer = "".join(chance.choice(list("abcdefgh"), letters))
        parts = [*(Part("image", picture) for picture in pictures), Part("audio", sound), Part("text", "b")]
        turns = (Message("user", tuple(parts)), Message("assistant", (Part("text", answer),)))
        return processor.encode(Sample("row", turns), media)

    empty = encoded(1).length
    assert empty < length, f"sound and pictures alone take {empty} tokens"
    return encoded(1 + length - empty)


def loaded(preset: str, folder: Path) -> tuple[Any, Any, Any]:
    spec, config = resolve(ModelSection.model_validate(model_section(preset, folder)))
    assert spec.processor is not None
    return spec, config, spec.processor(config, folder)


def prepared(options: dict[str, Any], folder: Path) -> tuple[Any, Batch, float]:
    """Return the configuration, the batch, and the FLOPs of a step."""
    spec, config, processor = loaded(options["preset"], folder)
    side = 56 * config.vision.patch_size
    batch = processor.collate([[row(options["length"], options["minutes"], side, processor)]], options["length"])
    return config, batch, spec.flops(config, batch, {})


def measure_ours(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    on_gpu = options["device"] == "cuda"
    _, batch, flops = prepared(options, folder)
    peak = vlm.matmul_peak() if on_gpu else 1e12
    recipe = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": model_section(options["preset"], folder),
        "data": {"length": options["length"]},
        "parallel": {"compile": on_gpu, "recompute": LAYERS},
        "precision": BF16 if on_gpu else {},
        "train": {"steps": options["steps"], "device": options["device"]},
        "checkpoint": {"at_end": False},
        "log": {"every": vlm.EVERY},
    }
    planned = max(role.total for role in tessera.dry_run(recipe, world=1))
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = tessera.train(recipe, overwrite=True, dataset=SameRow(batch, options["device"]))
    rows = [line for line in run.metrics if "step_seconds" in line]
    seconds = [line["step_seconds"] for line in rows if line["step"] > options["warm_up"]]
    losses = [line["loss"] for line in rows]
    result = facts(options, seconds, flops, peak, rows[0]["step_seconds"], losses)
    return {**result, "planned_gib": round(planned / 2**30, 1)}


def measure_reference(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    on_gpu = options["device"] == "cuda"
    config, batch, flops = prepared(options, folder)
    peak = vlm.matmul_peak() if on_gpu else 1e12
    if on_gpu:
        torch.set_default_dtype(torch.bfloat16)
    with torch.device(options["device"]):
        model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(
            Qwen2_5OmniThinkerConfig(**config.to_hf()), attn_implementation="sdpa"
        )
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    inputs = reference_inputs(options, config, batch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    for step in range(options["steps"]):
        moved = {name: tensor.to(options["device"], non_blocking=True) for name, tensor in inputs.items()}
        loss = model(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 0 or (step + 1) % vlm.EVERY == 0:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - began) / min(vlm.EVERY, step + 1))
            began = now
    timed = seconds[1 + options["warm_up"] // vlm.EVERY :]
    return facts(options, timed, flops, peak, seconds[0], [float(loss) for loss in losses])


def reference_inputs(options: dict[str, Any], config: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the same row as `transformers` takes it, with random numbers as sound and pictures."""
    ids = batch["tokens"][None]
    frames = int(options["minutes"] * 60 * RATE) // 160
    patches = batch["pixels"].shape[0]
    dtype = torch.bfloat16 if options["device"] == "cuda" else torch.float32
    labels = torch.full_like(ids, -100)
    labels[0, 1:] = batch["labels"][:-1]  # transformers shifts labels itself
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(patches, batch["pixels"].shape[1], dtype=dtype),
        "image_grid_thw": torch.tensor([[1, 56, 56]] * PICTURES),
        "input_features": torch.randn(1, config.audio.num_mel_bins, frames, dtype=dtype),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.int64),
    }


def facts(
    options: dict[str, Any], seconds: Sequence[float], flops: float, peak: float, first: float, losses: list[float]
) -> dict[str, Any]:
    middle = float(np.median(list(seconds)))
    shared = {"ms": round(middle * 1e3, 1), "tokens_per_s": round(options["length"] / middle), "loss": losses[-1]}
    shared["finite"] = bool(np.isfinite(losses).all())
    if options["device"] != "cuda":
        return shared
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {**shared, "of_peak": round(flops / middle / peak, 3), "peak_gib": round(gib, 1), "first_s": round(first, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="7b", choices=["quickstart", "3b", "7b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=vlm.STEPS)
    options = vars(parser.parse_args()) | {"warm_up": vlm.WARM_UP}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(folder, options["preset"])
        ours = apart(measure_ours, options, folder)
        print(json.dumps({"case": "tessera", "torch": torch.__version__, **ours}), flush=True)
        reference = apart(measure_reference, options, folder)
        print(json.dumps({"case": "transformers", "torch": torch.__version__, **reference}), flush=True)
        if "ms" in ours and "ms" in reference:
            print(json.dumps({"ratio": round(reference["ms"] / ours["ms"], 2)}), flush=True)


if __name__ == "__main__":
    main()
