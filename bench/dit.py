"""Speed of training diffusion transformers on one accelerator: Tessera through its Trainer, and diffusers as it comes.

    python bench/dit.py                      # every case of the tables below, one JSON line each
    python bench/dit.py wan wan-diffusers    # some of them

Wan2.1-1.3B and 14B see one video of 81 frames of 480 x 832 (32,760 tokens) with a caption of 512 tokens; Flux one image
of 1024 x 1024 (4,096 tokens) with 512. Weights, latents and embeddings are random. `of_peak` is FLOPs of the model (no
recompute) over the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversations import apart
from latent_rows import TEXT, OneSample
from torch import Tensor
from vlm import BF16, matmul_peak

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.core.spec import ModelSpec
from tessera.models import resolve

EVERY, WARM_UP, STEPS = 2, 4, 10
KEEP_ATTENTION = [{"modules": "{blocks,double_blocks,single_blocks}.{*}", "keep": "attention"}]
LORA = {"rank": 16}
WAN, FLUX = (21, 30, 52), (1, 64, 64)  # frames, rows and columns of tokens

TESSERA: dict[str, dict[str, Any]] = {
    "wan": {"model": ("wan", "2.1-t2v-1.3b"), "grid": WAN, "recompute": []},
    "wan-recompute": {"model": ("wan", "2.1-t2v-1.3b"), "grid": WAN, "recompute": KEEP_ATTENTION},
    "flux": {"model": ("flux", "dev"), "grid": FLUX, "recompute": KEEP_ATTENTION},
    "flux-lora": {"model": ("flux", "dev"), "grid": FLUX, "recompute": KEEP_ATTENTION, "lora": LORA},
    "wan-14b-lora": {"model": ("wan", "2.1-t2v-14b"), "grid": WAN, "recompute": KEEP_ATTENTION, "lora": LORA},
}
DIFFUSERS: dict[str, dict[str, Any]] = {
    "wan-diffusers": {"of": "wan", "recompute": True, "compile": False},
    "wan-diffusers-compiled": {"of": "wan", "recompute": True, "compile": True},
    "wan-diffusers-compiled-all-kept": {"of": "wan", "recompute": False, "compile": True},
    "flux-diffusers": {"of": "flux", "recompute": True, "compile": False},
    "flux-lora-diffusers": {"of": "flux-lora", "recompute": True, "compile": False},
    "wan-14b-lora-diffusers": {"of": "wan-14b-lora", "recompute": True, "compile": False},
}


def facts(seconds: Sequence[float], flops: float, peak: float, first: float, losses: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "ms": round(middle * 1e3, 1),
        "of_peak": round(flops / middle / peak, 3),
        "peak_tflops": round(peak / 1e12),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "compile_s": round(first - middle, 1),
        "loss": round(losses[-1], 3),
        "finite": bool(torch.tensor(losses).isfinite().all()),
    }


def described(case: dict[str, Any]) -> tuple[ModelSpec, Any, OneSample]:
    family, preset = case["model"]
    spec, config = resolve(ModelSection(family=family, preset=preset))
    return spec, config, OneSample(spec, config, case["grid"])


def measure_ours(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    peak = matmul_peak()
    family, preset = case["model"]
    _, _, rows = described(case)
    recipe = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": {"family": family, "preset": preset, **({"lora": case["lora"]} if "lora" in case else {})},
        "data": {"kind": "custom", "workers": 1},
        "parallel": {"compile": True, "recompute": case["recompute"]},
        "precision": BF16,
        "train": {"steps": STEPS},
        "checkpoint": {"at_end": False},
        "log": {"every": EVERY},
    }
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = tessera.train(recipe, overwrite=True, dataset=rows)
    lines = [row for row in run.metrics if "step_seconds" in row]
    timed = [row["step_seconds"] for row in lines if row["step"] > WARM_UP]
    return facts(timed, rows.flops, peak, lines[0]["step_seconds"], [row["loss"] for row in lines])


def measure_diffusers(case: dict[str, Any], _: Path) -> dict[str, Any]:
    peak = matmul_peak()
    ours = TESSERA[case["of"]]
    spec, config, rows = described(ours)
    model, call = (wan if spec.name == "wan" else flux)(config, rows.sample)
    if case["recompute"]:
        model.enable_gradient_checkpointing()
    model.train()
    if "lora" in ours:
        from peft import LoraConfig

        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=LORA["rank"], target_modules=targets, init_lora_weights="gaussian"))
    if case["compile"]:
        for block in model.blocks:
            block.compile()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    began = time.perf_counter()
    for step in range(STEPS):
        loss = call()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 0 or (step + 1) % EVERY == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - began) / (1 if step < EVERY else EVERY))
            began = now
    timed = seconds[1 + WARM_UP // EVERY :]
    return facts(timed, rows.flops, peak, seconds[0], [float(loss) for loss in losses])


def wan(config: Any, batch: Batch) -> tuple[Any, Callable[[], Tensor]]:
    from diffusers import WanTransformer3DModel

    with torch.device("cuda"):
        model = WanTransformer3DModel.from_config(config.to_hf()).bfloat16()
    frames, rows, columns = batch.shapes["latents"][0]
    latents = torch.randn(1, 16, frames, 2 * rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    text, time_ = batch["text"].cuda()[None], torch.tensor([500.0], device="cuda")
    target = torch.randn_like(latents)

    def call() -> Tensor:
        out = model(latents, timestep=time_, encoder_hidden_states=text, return_dict=False)[0]
        return F.mse_loss(out.float(), target.float())

    return model, call


def flux(config: Any, batch: Batch) -> tuple[Any, Callable[[], Tensor]]:
    from diffusers import FluxTransformer2DModel

    # With the strides of this model's gradients torch 2.11 reads past the end of tensors in cuDNN's attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = FluxTransformer2DModel.from_config(config.to_hf())
    torch.set_default_dtype(torch.float32)
    frames, rows, columns = batch.shapes["latents"][0]
    tokens = frames * rows * columns
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    latents, target = torch.randn(1, tokens, 64, **kind), torch.randn(1, tokens, 64, **kind)
    ids = torch.stack(
        torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij"), -1
    )
    inputs = {
        "encoder_hidden_states": batch["text"].cuda()[None],
        "pooled_projections": batch["pooled"].cuda()[:1],
        "timestep": torch.tensor([0.5], **kind),
        "guidance": torch.tensor([3.5], device="cuda"),
        "img_ids": ids.reshape(-1, 3).to("cuda"),
        "txt_ids": torch.zeros(TEXT, 3, device="cuda"),
    }

    def call() -> Tensor:
        return F.mse_loss(model(latents, **inputs, return_dict=False)[0].float(), target.float())

    return model, call


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted or [*TESSERA, *DIFFUSERS]:
            measure, case = (measure_ours, TESSERA[name]) if name in TESSERA else (measure_diffusers, DIFFUSERS[name])
            line = {"case": name, "torch": torch.__version__, **apart(measure, case, Path(scratch))}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
