"""Speed of vision-language training on one accelerator: Tessera through its Trainer, and `transformers` as it comes.

    python bench/vlm.py                    # every case of the table below, one JSON line each
    python bench/vlm.py 3b-bf16 3b-hf      # some of them
    python bench/vlm.py mixed              # 100 different batches after warm-up: recompilations and data wait

All cases of a size see the same conversations: one of 8,192 tokens a row, with 4 pictures of 56 x 56 patches. Weights
are random: speed does not depend on them as long as they are finite. `of_peak` is FLOPs of the model (no recompute,
half the square of causal attention) over the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversations import SIDE, SPECIAL, VOCABULARY, apart, model_section, write_even, write_mixed, write_tokenizer

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.callback import Callback, StepResult
from tessera.models import resolve

FAMILY = "qwen2_5_vl"
LENGTH, PICTURES = 8192, 4
LAYERS = ["text.layers.{*}", "vision.blocks.{*}"]
# The host looks at the device once in so many steps, in all cases: a look at every step would be timed with it.
EVERY, WARM_UP, STEPS = 4, 8, 20

BF16 = {"weights": "bfloat16", "reduce": "bfloat16"}
TESSERA: dict[str, dict[str, Any]] = {
    "3b-bf16": {"preset": "3b", "precision": BF16, "parallel": {"compile": True}},
    "3b-fp32-master": {
        "preset": "3b",
        "precision": {"weights": "float32", "compute": "bfloat16"},
        # One rank has nothing to gather: casting the weights once a step is enough where they fit.
        "parallel": {"compile": True, "reshard_after_forward": False},
    },
    "3b-bf16-plain": {"preset": "3b", "precision": BF16, "parallel": {}},
    "7b-bf16-recompute": {
        "preset": "7b",
        "precision": BF16,
        "parallel": {"compile": True, "recompute": LAYERS},
    },
}
REFERENCE: dict[str, dict[str, Any]] = {
    "3b-hf": {"preset": "3b", "recompute": False, "liger": False},
    "3b-hf-liger": {"preset": "3b", "recompute": False, "liger": True},
    "7b-hf-recompute": {"preset": "7b", "recompute": True, "liger": False},
    "7b-hf-liger-recompute": {"preset": "7b", "recompute": True, "liger": True},
}


# ---------------------------------------------------------------------------------------------- what is counted


def matmul_peak() -> float:
    """FLOP/s of a large bf16 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize()
    return 30 * 2 * 8192**3 / (time.perf_counter() - began)


def model_flops(preset: str, folder: Path) -> float:
    """Of one row of the even set."""
    spec, config = resolve(ModelSection.model_validate(model_section(FAMILY, preset, folder / "tokenizer")))
    assert spec.work is not None
    patches, near = PICTURES * 56 * 56, PICTURES * 49 * 64**2
    measures = {
        "tokens": np.array(LENGTH),
        "trained": np.array(LENGTH - PICTURES * (28 * 28 + 2) - 64),  # the letters of the answer
        "token_pairs": np.array(LENGTH**2),
        "patches": np.array(patches),
        "patch_pairs": np.array(PICTURES * (56 * 56) ** 2),
        "window_pairs": np.array(near),
    }
    return float(sum(part.sum() for part in spec.work(config, measures, {}).values()))


def facts(seconds: list[float], flops: float, peak: float, first: float, losses: list[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "ms": round(middle * 1e3, 1),
        "tokens_per_s": round(LENGTH / middle),
        "of_peak": round(flops / middle / peak, 3),
        "peak_tflops": round(peak / 1e12),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "compile_s": round(first - middle, 1),  # what the first step takes longer: compiling, and what all begin with
        "loss": round(losses[-1], 3),
        "finite": bool(np.isfinite(losses).all()),
    }


# ---------------------------------------------------------------------------------------------- the cases


def ours(
    case: dict[str, Any],
    folder: Path,
    file: str = "even",
    steps: int = STEPS,
    every: int = EVERY,
    extra: list[Callback] | None = None,
) -> Any:
    recipe = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": model_section(FAMILY, case["preset"], folder / "tokenizer"),
        "data": {
            "train": str(folder / f"{file}.jsonl"),
            "length": LENGTH,
            "workers": 4,
            "processor": {"max_pixels": SIDE * SIDE},
        },
        "parallel": case["parallel"],
        "precision": case["precision"],
        "train": {"steps": steps},
        "checkpoint": {"at_end": False},
        "log": {"every": every},
    }
    return tessera.train(recipe, overwrite=True, callbacks=extra or [])


def measure_ours(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    peak = matmul_peak()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rows = [row for row in ours(case, folder).metrics if "step_seconds" in row]
    timed = [row for row in rows if row["step"] > WARM_UP]
    seconds, losses = [row["step_seconds"] for row in timed], [row["loss"] for row in rows]
    result = facts(seconds, model_flops(case["preset"], folder), peak, rows[0]["step_seconds"], losses)
    return {**result, "data_wait": round(statistics.median(row["data_wait"] for row in timed), 4)}


def measure_reference(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    if case["liger"]:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl

        apply_liger_kernel_to_qwen2_5_vl()
    peak = matmul_peak()
    _, config = resolve(ModelSection.model_validate(model_section(FAMILY, case["preset"], folder / "tokenizer")))
    hf = config.to_hf()  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(Qwen2_5_VLConfig(**hf), attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    if case["recompute"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = [reference_batch(folder, row, config) for row in range(4)]
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    began = time.perf_counter()
    for step in range(STEPS):
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batches[step % len(batches)].items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 0 or (step + 1) % EVERY == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - began) / min(EVERY, step + 1))
            began = now
    timed = seconds[1 + WARM_UP // EVERY :]  # the first is that of the first step alone
    return facts(timed, model_flops(case["preset"], folder), peak, seconds[0], [float(loss) for loss in losses])


def reference_batch(folder: Path, row: int, config: Any) -> dict[str, torch.Tensor]:
    """The same conversation as `transformers` takes it: made beforehand, so that only the step is timed."""
    line = json.loads((folder / "even.jsonl").read_text().splitlines()[row])
    visual = 28 * 28
    picture = [config.vision_start_token_id, *[config.image_token_id] * visual, config.vision_end_token_id]
    words = [97 + ord(letter) % 8 for letter in line["messages"][1]["content"]]
    ids = torch.tensor([*picture * PICTURES, *words])[:LENGTH]
    ids = torch.cat([ids, torch.zeros(LENGTH - len(ids), dtype=torch.int64)])[None]
    labels = ids.masked_fill(ids >= VOCABULARY - len(SPECIAL), -100)
    pixels = torch.randn(PICTURES * 56 * 56, 3 * 2 * 14 * 14, dtype=torch.bfloat16)
    return {
        "input_ids": ids.pin_memory(),
        "labels": labels.pin_memory(),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels.pin_memory(),
        "image_grid_thw": torch.tensor([[1, 56, 56]] * PICTURES),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
    }


class CountGraphs(Callback):
    """How many graphs had been compiled when each step ended."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        from torch._dynamo.utils import counters

        self.graphs.append(int(counters["stats"]["unique_graphs"]))


def measure_mixed(folder: Path, warm_up: int = 25, steps: int = 100) -> dict[str, Any]:
    counter = CountGraphs()
    run = ours(TESSERA["3b-bf16"], folder, "mixed", warm_up + steps, every=1, extra=[counter])
    rows = [row for row in run.metrics if "step_seconds" in row][warm_up:]
    total = sum(row["step_seconds"] for row in rows)
    return {
        "batches": len(rows),
        "graphs_after_warm_up": counter.graphs[-1] - counter.graphs[warm_up - 1],
        "graphs": counter.graphs[-1],
        "data_wait": round(sum(row["data_wait"] * row["step_seconds"] for row in rows) / total, 4),
        "ms": round(total / len(rows) * 1e3, 1),
        "slowest_ms": round(max(row["step_seconds"] for row in rows) * 1e3, 1),
        "tflops": round(statistics.median(row["tflops"] for row in rows), 1),
    }


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(folder)
        write_even(folder, LENGTH, PICTURES)
        if not wanted or "mixed" in wanted:
            write_mixed(folder)
        for name in wanted or [*TESSERA, *REFERENCE, "mixed"]:
            line: dict[str, Any] = {"case": name, "torch": torch.__version__}
            if name == "mixed":
                line |= apart(measure_mixed, folder)
            elif name in TESSERA:
                line |= apart(measure_ours, TESSERA[name], folder)
            else:
                line |= apart(measure_reference, REFERENCE[name], folder)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
