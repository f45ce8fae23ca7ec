"""Speed of fine-tuning Whisper on one device: Tessera through its Trainer, and `transformers` through its own.

    python bench/whisper.py                                    # Whisper large-v3 on an accelerator
    python bench/whisper.py --preset quickstart --device cpu   # the same on a CPU, with a tiny model

Both train on 16 recordings in a step, with transcripts of 32 tokens. Weights are random: speed does not depend on them
as long as they are finite. The recordings fill the window of the encoder, and transformers gets their features and
labels ready-made, so that data do not limit it. Prints a line of JSON for each precision: weights in float32 with
computation in bfloat16 (the default of Tessera; `bf16=True` of `Seq2SeqTrainer`), and all in bfloat16. `trainer` is the
step of `Seq2SeqTrainer` with its defaults, `loop` that of the same model in a loop without the Trainer's work, and
`ratio` how many times faster Tessera is than either. `memory`: of a step, planned and measured.
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
PRECISIONS = {"float32": {}, "bfloat16": {"weights": "bfloat16", "reduce": "bfloat16"}}  # by dtype of the weights
FORMS: dict[str, dict[str, Any]] = {"compiled": {"compile": True}, "plain": {}}
# One group of weights instead of one for each block: fewer calls on the host, more memory. All groups in bfloat16 are
# the weights themselves.
FORMS_OF = {
    "float32": {**FORMS, "compiled, one group": {"compile": True, "wrap": [], "reshard_after_forward": False}},
    "bfloat16": FORMS,
}
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


def recipe(preset: str, device: str, folder: Path, weights: str, form: str) -> dict[str, Any]:
    return {
        "name": f"bench-{weights}",
        "out": str(folder / "runs"),
        "model": model_section(preset, folder),
        # Balanced rows leave some room: two rows of 16 recordings would become three.
        "data": {"train": str(folder / "train.jsonl"), "length": LENGTH, "workers": 4, "balance": False},
        "parallel": FORMS_OF[weights][form],
        "precision": PRECISIONS[weights],
        "train": {"steps": STEPS, "global_batch": 1, "device": device},
        "checkpoint": {"at_end": False},
        "log": {"every": EVERY},
    }


def measure_ours(preset: str, device: str, folder: Path, weights: str, form: str) -> dict[str, Any]:
    run = tessera.train(recipe(preset, device, folder, weights, form), overwrite=True)
    rows = [row for row in run.metrics if "step_seconds" in row]
    timed = [row for row in rows if row["step"] > WARM_UP]
    result = facts([row["step_seconds"] for row in timed], [row["loss"] for row in rows], device)
    return {**result, "data_wait": round(statistics.median(row["data_wait"] for row in timed), 4)}


def reference(preset: str, device: str, folder: Path, weights: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return transformers' model, its configuration here, and features and labels of a step."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    _, config = resolve(ModelSection.model_validate(model_section(preset, folder)))
    fields = {name: value for name, value in config.to_hf().items() if name != "architectures"}  # type: ignore[attr-defined]
    torch.set_default_dtype(getattr(torch, weights))
    with torch.device(device):
        model = WhisperForConditionalGeneration._from_config(WhisperConfig(**fields), attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    audio, end = config.audio, config.text.eos_token_id  # type: ignore[attr-defined]
    features = torch.randn(RECORDINGS, audio.num_mel_bins, 2 * audio.max_source_positions)
    inputs = {"input_features": features, "labels": torch.randint(0, end, (RECORDINGS, TOKENS - 1))}
    return model, config, inputs


def measure_loop(preset: str, device: str, folder: Path) -> dict[str, Any]:
    model, _, inputs = reference(preset, device, folder, "bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    inputs["input_features"] = inputs["input_features"].bfloat16()
    if devices.is_accelerator(device):
        inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
    clock, losses = Clock(), []
    for step in range(1, STEPS + 1):
        loss = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.tick(step)
    return facts(clock.timed, [float(loss) for loss in losses], device)


class Clock:
    """Time every `EVERY` steps, after the device has finished them."""

    def __init__(self) -> None:
        self.began, self.last = time.perf_counter(), 0
        self.timed: list[float] = []  # of steps after the warm-up

    def tick(self, step: int) -> None:
        if step % EVERY:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if step > WARM_UP:
            self.timed.append((now - self.began) / (step - self.last))
        self.began, self.last = now, step


def measure_trainer(preset: str, device: str, folder: Path, weights: str) -> dict[str, Any]:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, WhisperFeatureExtractor

    model, config, inputs = reference(preset, device, folder, weights)
    extractor = WhisperFeatureExtractor(feature_size=config.audio.num_mel_bins)
    rows = [{"input_features": x.numpy(), "labels": y} for x, y in zip(*inputs.values(), strict=True)]
    clock = Clock()

    class Tick(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.tick(state.global_step)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = extractor.pad([{"input_features": sample["input_features"]} for sample in samples], return_tensors="pt")
        labels = [sample["labels"] for sample in samples]
        batch["labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        batch["input_features"] = batch["input_features"].to(model.dtype)
        return dict(batch)

    on_device = devices.is_accelerator(device)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=RECORDINGS,
        max_steps=STEPS,
        learning_rate=1e-5,
        bf16=on_device and weights == "float32",
        use_cpu=not on_device,
        dataloader_num_workers=4,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=rows * STEPS, data_collator=collate, callbacks=[Tick()]
    )
    return facts(clock.timed, [trainer.train().training_loss], device)


def measure_memory(preset: str, device: str, weights: str, form: str) -> dict[str, Any]:
    precision = {f"precision.{key}": value for key, value in PRECISIONS[weights].items()}
    parallel = {f"parallel.{key}": value for key, value in FORMS_OF[weights][form].items()}
    settings = {"data.length": LENGTH, **parallel, **precision}
    return plan_memory.measure("whisper", preset, settings, device)


def main(preset: str, device: str) -> None:
    where = devices.resolve(device).type
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_set(preset, folder)
        for weights in PRECISIONS:
            forms = FORMS_OF[weights] if devices.is_accelerator(where) else ["plain"]
            ours = {form: apart(measure_ours, preset, where, folder, weights, form) for form in forms}
            theirs = {"trainer": apart(measure_trainer, preset, where, folder, weights)}
            if weights == "bfloat16":
                theirs["loop"] = apart(measure_loop, preset, where, folder)
            memory = {form: apart(measure_memory, preset, where, weights, form) for form in forms}
            fastest = min((result["ms"] for result in ours.values() if "ms" in result), default=None)
            ratio = {
                name: round(result["ms"] / fastest, 2) for name, result in theirs.items() if fastest and "ms" in result
            }
            line = {"preset": preset, "device": where, "torch": torch.__version__, "weights": weights, "ms": fastest}
            print(json.dumps({**line, "ratio": ratio, "memory": memory, "ours": ours, **theirs}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="large-v3")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    main(arguments.preset, arguments.device)
