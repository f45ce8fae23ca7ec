"""Speed of serving on one device: our engine, `transformers.generate`, and the limit of the memory, in one run.

    python bench/serve.py                        # Qwen2.5-VL-3B shape, 64 requests and 1, 128 new tokens, bf16
    python bench/serve.py --skip-transformers --profile
    python bench/serve.py --family qwen3_vl --preset 30b-a3b --skip-transformers
    python bench/serve.py --small                # the quick start's model, on a CPU too

Each request has one image of 32 x 32 patches (256 tokens) or so, and about 64 tokens of text. Weights are random: speed
does not depend on them. One JSON line per case. `ms_per_step`: median time of a step in which all requests decode.
`tokens_per_s`: new tokens over the time from the first prompt to the last token, with the vision tower. The case "jpeg"
also decodes the images. The limit of a step is the time to read the weights of the language model at the bandwidth of a
copy: of experts, those that are active if they are chosen at random. `limit_tokens_per_s` also counts the products of
the vision tower and of the prompts, at the speed of a large product.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversations import SPECIAL, VOCABULARY, model_section
from PIL import Image

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.core.cache import CacheRow
from tessera.data.media.files import Limits
from tessera.engine.engine import Engine
from tessera.engine.graphs import DecodeGraphs
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer

BLOCK_SIZE, LETTERS = 16, 42  # with the chat template, a prompt has about 64 tokens beside its image
device = torch.device(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else None
DEVICE = device or torch.device("cpu")


def wait() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


def report(case: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Print the result of a case, or its error: later cases run all the same."""
    began = time.perf_counter()
    try:
        line = measure()
    except Exception as error:
        line = {"error": f"{type(error).__name__}: {error}"[:600]}
    print(json.dumps({"case": case, **line, "took_s": round(time.perf_counter() - began, 1)}), flush=True)
    gc.collect()
    if DEVICE.type != "cpu":
        torch.accelerator.empty_cache()
    return line


# ---------------------------------------------------------------------------------------------- model and prompts


class Bench:
    """Hold a model with random weights on the device, and its requests."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.requests, self.new_tokens = options.requests, options.new_tokens
        vocabulary = 511 if options.small else VOCABULARY
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        train_tokenizer(["a"], vocabulary, [f"<|{word}|>" for word in SPECIAL]).save(str(tokenizer / "tokenizer.json"))
        section = {"family": "qwen2_vl", "preset": "quickstart", "tokenizer": str(tokenizer)}
        if not options.small:
            section = model_section(options.family, options.preset, tokenizer)
        self.spec, self.config = resolve(ModelSection.model_validate(section))
        self.dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
        self.side = 56 if options.small else 448
        self.tokenizer = tokenizer
        sizes = {"min_pixels": 196, "max_pixels": 3136} if options.small else {"max_pixels": 448 * 448}
        assert self.spec.processor is not None
        self.processor = self.spec.processor(self.config, tokenizer, system=None, **sizes)
        torch.set_default_dtype(self.dtype)
        with DEVICE:
            module = self.spec.main.build(self.config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        chance = torch.Generator(DEVICE).manual_seed(0)
        for name, parameter in module.named_parameters():
            module.initialize(name, parameter.data, chance)  # type: ignore[operator]
        self.module: Any = module
        self.model = LoadedModel(module, self.spec, self.config, self.processor)
        self.prompts = LoadedProcessor(self.processor, self.spec, Limits())
        noise = np.random.default_rng(0)
        self.files = []
        for number in range(self.requests):
            coarse = noise.integers(0, 255, (self.side // 8, self.side // 8, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((self.side, self.side), Image.Resampling.BICUBIC).save(file, "JPEG")
            self.files.append(folder / f"{number}.jpg")
            self.files[-1].write_bytes(file.getvalue())

    def talk(self, number: int) -> list[dict[str, Any]]:
        text = "".join("abcdefgh"[(number + at * at) % 8] for at in range(LETTERS))
        image = {"type": "image", "image": str(self.files[number])}
        return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]

    def batches(self, count: int) -> list[Batch]:
        return [self.prompts(self.talk(number)) for number in range(count)]

    def engine(self, count: int, batches: list[Batch]) -> Engine:
        longest = max(batch["tokens"].numel() for batch in batches) + self.new_tokens
        blocks = (count + 1) * (longest // BLOCK_SIZE + 2)
        # The memory of embeddings is 0, so that repeated measurements encode their images again.
        limits = EngineLimits(blocks, BLOCK_SIZE, rows=max(count, 2), tokens=32768, encoder_cache_bytes=0)
        return Engine(self.model, limits)


def answer(engine: Engine, prompts: Iterator[Batch], count: int, new_tokens: int) -> dict[str, Any]:
    """Answer prompts, which may still be prepared meanwhile."""
    wait()
    began = time.perf_counter()
    steps, produced, unfinished, before, first = [], 0, 0, began, 0.0
    for prompt in prompts:
        engine.add(Request(prompt, max_new_tokens=new_tokens, stream=False))
        unfinished += 1
    prepared = time.perf_counter() - began
    while unfinished:
        deltas = engine.step()
        now = time.perf_counter()
        tokens = sum(len(delta.tokens) for delta in deltas)
        unfinished -= sum(delta.finish is not None for delta in deltas)
        for delta in deltas:
            if delta.finish is not None and delta.finish.error is not None:
                raise delta.finish.error
        produced += tokens
        if produced and not first:
            first = now - began
        elif tokens == count:
            steps.append(now - before)
        before = now
    wait()
    took = time.perf_counter() - began
    line = {"seconds": round(took, 3), "tokens_per_s": round(produced / took), "new_tokens": produced}
    if len(steps) > 2:
        line["ms_per_step"] = round(statistics.median(steps) * 1e3, 3)
    line["first_token_s"] = round(first, 3)
    return line | ({"prepared_s": round(prepared, 3)} if prepared > 0.05 else {})


# ---------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Roofline:
    """Hold what the device does in a second, and what the model needs at least."""

    bandwidth: float  # bytes
    speed: float  # multiply-adds
    dense: int  # bytes of the language model without experts
    experts: int  # bytes of all experts
    inactive: float  # share of experts that a token does not choose
    vision: int  # multiply-adds of a patch
    text: float  # multiply-adds of a token of a prompt

    def step(self, rows: int) -> float:
        """Return the seconds to read the weights that a step of so many rows needs."""
        return (self.dense + self.experts * (1 - self.inactive**rows)) / self.bandwidth

    def tokens_per_s(self, batches: list[Batch], new_tokens: int) -> dict[str, float]:
        """Return the most tokens per second at which requests can be answered together."""
        patches = sum(batch["pixels"].shape[0] for batch in batches)
        prompts = (self.vision * patches + self.text * sum(batch["tokens"].numel() for batch in batches)) / self.speed
        steps = (new_tokens - 1) * self.step(len(batches))
        most = round(len(batches) * new_tokens / (prompts + steps))
        return {"limit_prompts_s": round(prompts, 3), "limit_steps_s": round(steps, 3), "limit_tokens_per_s": most}


def roofline(bench: Bench) -> Roofline:
    on_host = DEVICE.type == "cpu"
    a = torch.empty(2**26 if on_host else 2**31, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copy = timed(lambda: b.copy_(a), 5)[0] / 1e3
    side = 1024 if on_host else 8192
    x = torch.randn(side, side, device=DEVICE, dtype=bench.dtype)
    product = timed(lambda: x @ x, 10)[0] / 1e3
    named = [(name, p) for name, p in bench.module.named_parameters() if p.dim() > 1 and "table" not in name]
    experts = [p for name, p in named if name.startswith("text.") and p.dim() == 3]
    plain = [p for name, p in named if name.startswith(("text.layers.", "head.")) and p.dim() == 2]
    tied = [] if any(name.startswith("head.") for name, _ in named) else [bench.module.text.embed.weight]
    shape = bench.module.text.experts
    active = shape.top_k / shape.experts if shape else 1.0
    # The head computes the last token of a prompt only. The projector has an input for each 2 x 2 patches.
    layers = sum(p.numel() for name, p in named if name.startswith("text.layers.") and p.dim() == 2)
    vision = sum(
        p.numel() // (1 if name.startswith("vision.") else 4) for name, p in named if name[:4] in ("visi", "proj")
    )
    return Roofline(
        2 * a.nbytes / copy,
        side**3 / product,
        sum(p.nbytes for p in [*plain, *tied]),
        sum(p.nbytes for p in experts),
        1 - active,
        vision,
        layers + active * sum(p.numel() for p in experts),
    )


def limit(bench: Bench, most: Roofline) -> dict[str, Any]:
    return {
        "bandwidth_GB_s": round(most.bandwidth / 1e9),
        "product_TFLOP_s": round(2 * most.speed / 1e12, 1),
        "language_weights_GB": round((most.dense + most.experts) / 1e9, 3),
        "limit_ms_per_step": {rows: round(most.step(rows) * 1e3, 3) for rows in (1, bench.requests)},
        "torch": torch.__version__,
    }


def ours(bench: Bench, count: int, most: Roofline) -> dict[str, Any]:
    batches = bench.batches(count)
    engine = bench.engine(count, batches)
    warm = answer(engine, iter(batches), count, min(8, bench.new_tokens))  # compiles, and captures graphs
    fresh = bench.engine(count, batches) if DEVICE.type == "cpu" else engine
    line = answer(fresh, iter(new_images(batches)), count, bench.new_tokens)
    line |= most.tokens_per_s(batches, bench.new_tokens)
    return {**line, "prompt_tokens": batches[0]["tokens"].numel(), "warm_up_s": warm["seconds"]}


def new_images(batches: list[Batch]) -> list[Batch]:
    """Return prompts with other tokens and pixels, so that the engine reuses nothing of the warm-up."""
    return [batch.with_tensors(pixels=changed(batch["pixels"])) for batch in batches]


def changed(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.flip(0).contiguous()


def one_by_one(bench: Bench, times: int) -> dict[str, Any]:
    batches = bench.batches(times)
    engine = bench.engine(1, batches)
    answer(engine, iter(batches[:1]), 1, 4)
    began = time.perf_counter()
    for batch in batches:
        answer(engine, iter([batch]), 1, bench.new_tokens)
    took = (time.perf_counter() - began) / times
    return {"seconds_each": round(took, 3), "tokens_per_s": round(bench.new_tokens / took)}


def jpeg(bench: Bench, count: int) -> dict[str, Any]:
    """Images are read and decoded in worker processes, after the clock has started."""
    try:
        from tessera.inference.prepare import PromptPool
    except ImportError:
        return {"skipped": "no tessera.inference.prepare here"}
    batches = bench.batches(count)
    engine = bench.engine(count, batches)
    answer(engine, iter(new_images(batches)), count, min(8, bench.new_tokens))
    pool = PromptPool(bench.prompts)
    try:
        pool.submit(bench.talk(0)).result()  # starts the processes
        futures = pool.map(bench.talk(number) for number in range(count))
        return answer(engine, (future.result() for future in futures), count, bench.new_tokens)
    finally:
        pool.close()


@torch.no_grad()
def breakdown(bench: Bench, count: int, profile: bool) -> dict[str, Any]:
    """Time a decode call by itself: in graphs and without, on the device and on the host; and choosing the tokens."""
    blocks = -(-(512 - 64) // BLOCK_SIZE)
    cache = bench.module.new_cache(count * blocks + 1, BLOCK_SIZE)
    rows = [CacheRow(range(1 + row * blocks, 1 + (row + 1) * blocks), 384, 1) for row in range(count)]
    tokens = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    positions = torch.full((3, count), 384, device=DEVICE)
    graphs = DecodeGraphs(bench.module, cache, 0, DEVICE)
    line: dict[str, Any] = {}
    for name in ("graph", "plain"):
        if name == "plain" or not graphs.usable:
            graphs.usable, name = False, "plain"
        line[f"{name}_ms"], line[f"{name}_host_ms"] = timed(lambda: graphs.run(tokens, positions, rows))
    graphs = DecodeGraphs(bench.module, cache, 0, DEVICE)
    logits = graphs.run(tokens, positions, rows)
    line["argmax_ms"], _ = timed(lambda: logits.argmax(-1))
    if profile and DEVICE.type != "cpu":
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as records:
            graphs.run(tokens, positions, rows)
            wait()
        kernels = [event for event in records.key_averages() if event.self_device_time_total > 0]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        line["kernels"] = [
            [event.key[:70], event.count, round(event.self_device_time_total / 1e3, 3)] for event in kernels[:14]
        ]
    return line


def timed(run: Callable[[], Any], times: int = 20) -> tuple[float, float]:
    """Return milliseconds of a call, and those of the host to start it."""
    for _ in range(3):
        run()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    host = time.perf_counter() - began
    wait()
    return round((time.perf_counter() - began) / times * 1e3, 3), round(host / times * 1e3, 3)


def transformers_model(bench: Bench, small: bool) -> Any:
    import transformers

    name = "Qwen2VL" if small else "Qwen2_5_VL"
    config = getattr(transformers, f"{name}Config")(**bench.config.to_hf())  # type: ignore[attr-defined]
    torch.set_default_dtype(bench.dtype)
    with DEVICE:
        kind = getattr(transformers, f"{name}ForConditionalGeneration")
        model = kind._from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    return model


@torch.no_grad()
def reference(bench: Bench, model: Any, count: int) -> dict[str, Any]:
    """All prompts are equally long, which is the best case for a padded batch."""
    batches = bench.batches(count)
    tokens = torch.stack([batch["tokens"] for batch in batches]).to(DEVICE)
    image = bench.config.image_token_id  # type: ignore[attr-defined]
    patches = batches[0]["pixels"].shape[0]
    side = int(patches**0.5)
    pixels = torch.randn(count * patches, batches[0]["pixels"].flatten(1).shape[1], device=DEVICE, dtype=bench.dtype)
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == image).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]] * count, device=DEVICE),
    }
    exact = {"do_sample": False, "pad_token_id": 0}
    model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, **exact)
    wait()
    began = time.perf_counter()
    new = bench.new_tokens
    model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **exact)
    wait()
    took = time.perf_counter() - began
    return {
        "seconds": round(took, 3),
        "tokens_per_s": round(count * new / took),
        "ms_per_step": round(took / new * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--preset", default="3b")
    parser.add_argument("--small", action="store_true", help="the quick start's model")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--profile", action="store_true", help="name the kernels of a decode call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, Path(scratch))
        count = bench.requests
        most = roofline(bench)
        report("limit", lambda: limit(bench, most))
        together = report(f"ours, {count} at once", lambda: ours(bench, count, most))
        if DEVICE.type == "cpu":
            single = report("ours, one by one", lambda: one_by_one(bench, min(count, 8)))
            if "tokens_per_s" in together and "tokens_per_s" in single:
                ratio = round(together["tokens_per_s"] / single["tokens_per_s"], 1)
                print(json.dumps({"case": "at once over one by one", "ratio": ratio}), flush=True)
        else:
            report("ours, 1", lambda: ours(bench, 1, most))
        report(f"ours, {count} at once, jpeg", lambda: jpeg(bench, count))
        for rows in (count, 1):
            report(f"a decode call of {rows}", lambda rows=rows: breakdown(bench, rows, options.profile))  # type: ignore[misc]
        if not options.skip_transformers:
            model = transformers_model(bench, options.small)
            report("transformers, 1", lambda: reference(bench, model, 1))
            report(f"transformers, batch of {count}", lambda: reference(bench, model, count))


if __name__ == "__main__":
    main()
