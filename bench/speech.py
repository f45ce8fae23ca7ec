"""Speed of training models that speak on one accelerator: CSM beside `transformers`, and the talker of Qwen3-Omni.

    python bench/speech.py                       # CSM 1B and the talker of Qwen3-Omni-30B-A3B, one JSON line each
    python bench/speech.py csm --steps 8         # one of them
    python bench/speech.py --preset quickstart --device cpu --length 512 --steps 8   # a try on a CPU

A step of Tessera is a packed row of 4,096 tokens: sentences of 5 to 15 s with their codes (12.5 frames a second), all
of whose frames train the decoder of codebooks. Rows have different numbers of frames. `transformers` reads the same
sentences of CSM as a padded batch, from their codes ("transformers") and from recordings, which its codec encodes in
each step ("transformers from sound"). No peer trains the talker. Weights are random and in bfloat16, without recompute.
`of_peak` is FLOPs of the model over the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plan_memory
import torch
import vlm
from conversations import apart

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.core.step_source import StepSource
from tessera.models import resolve
from tessera.models.processing.tokenizer import load_tokenizer, train_tokenizer
from tessera.models.qwen3_omni.processor import QWEN3_OMNI

FAMILIES = {"csm": ("csm", "1b"), "talker": ("qwen3_omni_talker", "30b-a3b")}
FRAME_RATE, SAMPLES = 12.5, 1920  # frames a second; samples of sound in a frame
ROWS = 4
CSM_WORDS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")
TALKER_WORDS = ("<|endoftext|>", "<tts_pad>", "<tts_bos>", "<tts_eos>")
BF16 = {"weights": "bfloat16", "reduce": "bfloat16"}


class Rows(StepSource):
    """Give one batch after the other, copied to the device each time."""

    def __init__(self, batches: list[Batch], device: str) -> None:
        self.batches = [batch.pin_memory() if device == "cuda" else batch for batch in batches]
        self.device, self.step = device, 0

    def start(self, step: int, row: int) -> None:
        self.step = step

    def next_step(self) -> list[Batch]:
        batch = self.batches[self.step % len(self.batches)]
        self.step += 1
        return [batch.to(self.device, non_blocking=True)]


def write_tokenizer(family: str, preset: str, folder: Path) -> dict[str, int]:
    """Write a tokenizer of letters, and return the ids of special tokens in the model's configuration."""
    _, config = resolve(ModelSection(family=family, preset=preset))
    if family == "csm":
        size = config.text.vocab_size  # type: ignore[attr-defined]
        train_tokenizer(["a"], size, CSM_WORDS).save(str(folder / "tokenizer.json"))
        return {"audio_token_id": size - 2, "audio_eos_token_id": size - 1}
    size = config.thinker.text.vocab_size  # type: ignore[attr-defined]
    roles, words = ["assistant", "user", "system"], [*TALKER_WORDS, *QWEN3_OMNI.special_words()]
    train_tokenizer([" ".join(roles * 8), *roles * 8], size, words).save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    names = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", **{role: role for role in roles}}
    names |= {f"tts_{name}": f"<tts_{name}>" for name in ("pad", "bos", "eos")}
    return {f"{name}_token_id": tokenizer.encode(word).ids[0] for name, word in names.items()}


def model_section(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {**options["ids"]}
    if options["family"] == "qwen3_omni_talker":
        tokenizer = load_tokenizer(folder)
        _, config = resolve(ModelSection(family=options["family"], preset=options["preset"]))
        special = config.thinker.special_token_ids  # type: ignore[attr-defined]
        at = {word: tokenizer.token_to_id(word) for word in special}
        types = type(config.thinker).token_fields.items()  # type: ignore[attr-defined]
        fields["thinker"] = {name: at[word] for name, word in types if at.get(word) is not None}
    return {"family": options["family"], "preset": options["preset"], "tokenizer": str(folder), "config": fields}


def sentences(options: dict[str, Any], config: Any, processor: Any, row: int) -> list[Sample]:
    """Return the sentences of a row, about a token of text for four frames."""
    chance, free = np.random.default_rng(row), options["length"]
    samples: list[Sample] = []
    codebooks, least = processor.codebooks, min(processor.sizes)
    for number in range(10**4):
        frames = int(chance.integers(int(5 * FRAME_RATE), int(15 * FRAME_RATE)))
        text = "".join(chance.choice(list("bcdfgh"), frames // 4))
        codes = chance.integers(1, least, (frames, codebooks))
        spoken = Message("assistant", (Part("text", text), Part("codes", codes)))
        question = (Message("user", (Part("text", "b"),)),) if options["family"] != "csm" else ()
        sample = Sample(f"{row}-{number}", (*question, spoken))
        size = len(encoded(processor, sample).tokens)
        if size > free:
            return samples
        free -= size
        samples.append(sample)
    raise AssertionError("a row has an end")


def encoded(processor: Any, sample: Sample) -> Any:
    media = [part.value for part in sample.media()]
    return processor.encode(sample, media)


def prepared(options: dict[str, Any], folder: Path) -> tuple[Any, list[list[Sample]], list[Batch], float]:
    """Return the configuration, the sentences of each row, their batches, and the FLOPs of a mean step."""
    spec, config = resolve(ModelSection.model_validate(model_section(options, folder)))
    assert spec.processor is not None
    processor = spec.processor(config, folder)
    rows = [sentences(options, config, processor, row) for row in range(ROWS)]
    batches = [processor.collate([[encoded(processor, s) for s in row]], options["length"]) for row in rows]
    return config, rows, batches, sum(spec.flops(config, batch, {}) for batch in batches) / ROWS  # type: ignore[misc]


def recipe(options: dict[str, Any], folder: Path, compiled: bool) -> dict[str, Any]:
    return {
        "name": f"bench-{compiled}",
        "out": str(folder / "runs"),
        "model": model_section(options, folder),
        "data": {"length": options["length"]},
        "parallel": {"compile": compiled},
        "precision": BF16 if options["device"] == "cuda" else {},
        "train": {"steps": options["steps"], "device": options["device"]},
        "checkpoint": {"at_end": False},
        "log": {"every": vlm.EVERY},
    }


def measure_ours(options: dict[str, Any], folder: Path, compiled: bool) -> dict[str, Any]:
    _, _, batches, flops = prepared(options, folder)
    peak = peak_of(options)
    run = tessera.train(recipe(options, folder, compiled), overwrite=True, dataset=Rows(batches, options["device"]))
    lines = [line for line in run.metrics if "step_seconds" in line]
    seconds = [line["step_seconds"] for line in lines if line["step"] > vlm.WARM_UP]
    return facts(options, seconds, flops, peak, [line["loss"] for line in lines])


def measure_reference(options: dict[str, Any], folder: Path, from_sound: bool) -> dict[str, Any]:
    from transformers import CsmConfig, CsmForConditionalGeneration

    config, rows, _, flops = prepared(options, folder)
    peak, on_gpu = peak_of(options), options["device"] == "cuda"
    fields = {name: value for name, value in config.to_hf().items() if name != "architectures"}
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with torch.device(options["device"]):
        model = CsmForConditionalGeneration._from_config(CsmConfig(**fields), attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    model.codec_model.eval().requires_grad_(False)
    table = model.depth_decoder.model.embed_tokens.weight
    model.backbone_model.embed_tokens.embed_audio_tokens.weight = table
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    processor = resolve(ModelSection.model_validate(model_section(options, folder)))[0].processor(config, folder)  # type: ignore[misc]
    inputs = [padded(row, processor, model.dtype) for row in rows]
    call: Callable[..., Any] = model if from_sound else codes_of(model)
    seconds, losses, began = [], [], time.perf_counter()
    for step in range(options["steps"]):
        batch = {name: x.to(options["device"], non_blocking=True) for name, x in inputs[step % ROWS].items()}
        batch.pop("codes" if from_sound else "input_values")
        loss = call(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 0 or (step + 1) % vlm.EVERY == 0:
            float(losses[-1])  # wait for the device
            now = time.perf_counter()
            seconds.append((now - began) / min(vlm.EVERY, step + 1))
            began = now
    timed = seconds[1 + vlm.WARM_UP // vlm.EVERY :]
    return facts(options, timed, flops, peak, [float(loss) for loss in losses])


def codes_of(model: Any) -> Callable[..., Any]:
    """Return the forward pass of the class for codes that are known already."""

    def call(input_ids: torch.Tensor, codes: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        spoken = codes[..., 0] >= 0
        embeddings = model.embed_text_tokens(input_ids)
        embeddings[spoken] = model.backbone_model.embed_tokens(codes[spoken].unsqueeze(0))[0]
        return model(inputs_embeds=embeddings, attention_mask=attention_mask, labels=codes)

    return call


def padded(row: list[Sample], processor: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the sentences of a row as a padded batch, with their codes and with noise as their recordings."""
    items = [encoded(processor, sample) for sample in row]
    frames = [len(part.value) for sample in row for part in sample.media()]
    ids = torch.nn.utils.rnn.pad_sequence([item.tokens for item in items], batch_first=True)
    codes = torch.nn.utils.rnn.pad_sequence([item.codes.T for item in items], batch_first=True, padding_value=-100)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(item.tokens) for item in items], batch_first=True)
    spoken = codes[..., 0] >= 0
    longest = max(frames) * SAMPLES
    return {
        "input_ids": ids,
        "codes": codes,
        "attention_mask": mask,
        "labels": ids.where(spoken, -100),
        "input_values": torch.randn(len(row), 1, longest).mul(0.1).to(dtype),
        "input_values_cutoffs": torch.tensor(frames).unsqueeze(1) * SAMPLES,
    }


def measure_memory(options: dict[str, Any], compiled: bool) -> dict[str, Any]:
    weights = {"precision.weights": "bfloat16", "precision.reduce": "bfloat16"}
    settings = {"data.length": options["length"], "parallel.compile": compiled, **weights}
    return plan_memory.measure(options["family"], options["preset"], settings, options["device"])


def peak_of(options: dict[str, Any]) -> float:
    if options["device"] != "cuda":
        return 1e12
    peak = vlm.matmul_peak()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def facts(
    options: dict[str, Any], seconds: list[float], flops: float, peak: float, losses: list[float]
) -> dict[str, Any]:
    middle = float(np.median(seconds))
    result = {"ms": round(middle * 1e3, 1), "tokens_per_s": round(options["length"] / middle)}
    result |= {"loss": round(losses[-1], 3), "finite": bool(np.isfinite(losses).all()), "tflop": round(flops / 1e12, 1)}
    if options["device"] != "cuda":
        return result
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {**result, "of_peak": round(flops / middle / peak, 3), "peak_gib": round(gib, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=list(FAMILIES), help="csm, talker")
    parser.add_argument("--preset", help="default: that of the published model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=vlm.STEPS)
    arguments = vars(parser.parse_args())
    for case in arguments.pop("case"):
        family, preset = FAMILIES[case]
        preset = arguments["preset"] or preset
        options = {**arguments, "family": family, "preset": preset}
        forms = {"compiled": True, "plain": False} if arguments["device"] == "cuda" else {"plain": False}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            options["ids"] = write_tokenizer(family, preset, folder)
            line: dict[str, Any] = {name: apart(measure_ours, options, folder, on) for name, on in forms.items()}
            line["memory"] = {name: apart(measure_memory, options, on) for name, on in forms.items()}
            if case == "csm":
                line["transformers"] = apart(measure_reference, options, folder, False)
                if preset == "1b":  # the codec of the others has other codebooks
                    line["transformers from sound"] = apart(measure_reference, options, folder, True)
        print(json.dumps({"case": case, "preset": preset, "torch": torch.__version__, **line}), flush=True)


if __name__ == "__main__":
    main()
