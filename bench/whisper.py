"""Speed of fine-tuning Whisper on one device: Tessera through its Trainer, and `transformers` as it comes.

    python bench/whisper.py                                    # Whisper large-v3 on an accelerator
    python bench/whisper.py --preset quickstart --device cpu   # the same on a CPU, with a tiny model

Both train on the same recordings, 16 in a step, with transcripts of 32 tokens, in bfloat16. Weights are random: speed
does not depend on them as long as they are finite. The recordings fill the window of the encoder, and transformers gets
their features and labels ready-made, so that only its step is timed. Prints one line of JSON: milliseconds of both, how
many times faster Tessera is (`ratio`), and the memory of a step, planned and measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import plan_memory
import torch
from conversations import apart

import tessera
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.runtime import device as devices

RECORDINGS, TOKENS, RATE = 16, 32, 16_000
LENGTH = RECORDINGS * TOKENS
# The host looks at the device once in so many steps, in both cases: a look at every step would be timed with it.
EVERY, WARM_UP, STEPS = 4, 8, 20
BF16 = {"weights": "bfloat16", "reduce": "bfloat16"}
LAYERS = ["audio.blocks.{*}", "text.layers.{*}"]
WORDS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]


def special(preset: str) -> list[str]:
    """The special tokens of a tokenizer: those of the prompt, and time stamps up to the length of a window."""
    _, config = resolve(ModelSection(family="whisper", preset=preset))
    return [*WORDS, *(f"<|{at * 0.02:.2f}|>" for at in range(config.audio.max_source_positions + 1))]  # type: ignore[attr-defined]


def model_section(preset: str, folder: Path) -> dict[str, Any]:
    _, config = resolve(ModelSection(family="whisper", preset=preset))
    end = config.text.vocab_size - len(special(preset))  # type: ignore[attr-defined]
    ids = {"decoder_start_token_id": end + 1, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return {"family": "whisper", "preset": preset, "tokenizer": str(folder / "tokenizer"), "config": {"text": ids}}


def write_set(preset: str, folder: Path) -> None:
    """Write a tokenizer, and recordings of noise whose transcripts are letters, each of them a token."""
    _, config = resolve(ModelSection(family="whisper", preset=preset))
    (folder / "tokenizer").mkdir()
    vocabulary = config.text.vocab_size  # type: ignore[attr-defined]
    train_tokenizer(["a"], vocabulary, special(preset)).save(str(folder / "tokenizer" / "tokenizer.json"))
    chance, rows = np.random.default_rng(0), []
    seconds = config.audio.max_source_positions // 50  # type: ignore[attr-defined]
    for number in range(2 * RECORDINGS):
        noise = chance.integers(-8000, 8000, seconds * RATE, dtype=np.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(noise), "NONE", ""))
            file.writeframes(noise.tobytes())
        text = "".join(chance.choice(list("abcdefgh"), TOKENS - 5))
        question = {"role": "user", "content": [{"type": "audio", "audio": f"{number}.wav"}]}
        rows.append({"messages": [question, {"role": "assistant", "content": text}]})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def facts(seconds: list[float], losses: list[float], device: str) -> dict[str, Any]:
    on_device = devices.is_accelerator(device)
    return {
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "recordings_per_s": round(RECORDINGS / statistics.median(seconds), 1),
        "peak_gib": round(torch.accelerator.max_memory_allocated() / 2**30, 1) if on_device else None,
        "loss": round(losses[-1], 3),
        "finite": bool(np.isfinite(losses).all()),
    }


def measure_ours(preset: str, device: str, folder: Path, compiled: bool) -> dict[str, Any]:
    recipe = {
        "name": f"bench-{compiled}",
        "out": str(folder / "runs"),
        "model": model_section(preset, folder),
        "data": {"train": str(folder / "train.jsonl"), "length": LENGTH, "workers": 4},
        "parallel": {"compile": compiled},
        "precision": BF16,
        "train": {"steps": STEPS, "global_batch": 1, "device": device},
        "checkpoint": {"at_end": False},
        "log": {"every": EVERY},
    }
    rows = [row for row in tessera.train(recipe, overwrite=True).metrics if "step_seconds" in row]
    timed = [row for row in rows if row["step"] > WARM_UP]
    result = facts([row["step_seconds"] for row in timed], [row["loss"] for row in rows], device)
    return {**result, "data_wait": round(statistics.median(row["data_wait"] for row in timed), 4)}


def measure_reference(preset: str, device: str, folder: Path) -> dict[str, Any]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    _, config = resolve(ModelSection.model_validate(model_section(preset, folder)))
    fields = {name: value for name, value in config.to_hf().items() if name != "architectures"}  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = WhisperForConditionalGeneration._from_config(WhisperConfig(**fields), attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    audio, end = config.audio, config.text.eos_token_id  # type: ignore[attr-defined]
    features = torch.randn(RECORDINGS, audio.num_mel_bins, 2 * audio.max_source_positions, dtype=torch.bfloat16)
    labels = torch.randint(0, end, (RECORDINGS, TOKENS - 1))
    if devices.is_accelerator(device):
        features, labels = features.pin_memory(), labels.pin_memory()
    seconds, losses = [], []
    began = time.perf_counter()
    for step in range(STEPS):
        loss = model(
            input_features=features.to(device, non_blocking=True), labels=labels.to(device, non_blocking=True)
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 0 or (step + 1) % EVERY == 0:
            float(losses[-1])  # wait for the device
            now = time.perf_counter()
            seconds.append((now - began) / min(EVERY, step + 1))
            began = now
    return facts(seconds[1 + WARM_UP // EVERY :], [float(loss) for loss in losses], device)


def measure_memory(preset: str, device: str, compiled: bool) -> dict[str, Any]:
    settings = {
        "data.length": LENGTH,
        "precision.weights": "bfloat16",
        "precision.reduce": "bfloat16",
        "parallel.compile": compiled,
    }
    return plan_memory.measure("whisper", preset, settings, device)


def main(preset: str, device: str) -> None:
    where = devices.resolve(device).type
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_set(preset, folder)
        forms = {"compiled": True, "plain": False} if devices.is_accelerator(where) else {"plain": False}
        ours = {name: apart(measure_ours, preset, where, folder, compiled) for name, compiled in forms.items()}
        reference = apart(measure_reference, preset, where, folder)
        memory = {name: apart(measure_memory, preset, where, compiled) for name, compiled in forms.items()}
    times = [result["ms"] for result in ours.values() if "ms" in result]
    fastest = min(times, default=None)
    ratio = round(reference["ms"] / fastest, 3) if fastest and "ms" in reference else None
    line = {"preset": preset, "device": where, "torch": torch.__version__, "ms": fastest}
    line |= {"transformers_ms": reference.get("ms"), "ratio": ratio, "memory": memory}
    print(json.dumps({**line, "ours": ours, "transformers": reference}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="large-v3")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    main(arguments.preset, arguments.device)
