"""Image-heavy serving: JPEGs of 2 megapixels and 8 new tokens, by our engine and by a loop over transformers.

    python bench/serve_images.py                 # Qwen2.5-VL-3B shape, 64 requests
    python bench/serve_images.py --small         # the quick start's model, on a CPU too

Ours: worker processes decode, resize and tokenize; the engine computes what is ready. transformers: its image processor
and `generate`, one request after another (its slow processor, if there is no torchvision). Clocks start before the
first file is read. `cpu_cores`: CPU time of the process and of its workers, over the time. One JSON line per case.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from serve import DEVICE, Bench, report, transformers_model, wait

from tessera.data.media.files import Limits
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.inference.loaded import LoadedProcessor
from tessera.inference.prepare import PromptPool

WIDTH, HEIGHT = 1632, 1224
WARM = 32  # photos before the clock starts: every worker process has read one


def write_photos(folder: Path, count: int) -> list[Path]:
    """Write parts of an image with detail at all scales, as photos have: the time to decode depends on it."""
    noise, size = np.random.default_rng(0), (WIDTH + 8 * count, HEIGHT + 8 * count)
    whole = np.zeros((size[1], size[0], 3), np.float32)
    for scale in (2, 16, 128):
        coarse = noise.integers(0, 255, (size[1] // scale + 1, size[0] // scale + 1, 3), dtype=np.uint8)
        whole += np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32) * scale**0.5
    photo, files = Image.fromarray((whole * (255 / whole.max())).astype(np.uint8)), []
    for number in range(count):
        corner = (8 * number, 8 * number)
        files.append(folder / f"photo-{number}.jpg")
        photo.crop((*corner, corner[0] + WIDTH, corner[1] + HEIGHT)).save(files[-1], quality=90)
    return files


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has started, running or not."""
    times: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            times[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"))
    family = {os.getpid()}
    while more := {number for number, (parent, _) in times.items() if parent in family} - family:
        family |= more
    return sum(times[number][1] for number in family)


def measured(run: Callable[[], int]) -> dict[str, Any]:
    """Time a function that returns how many requests it has answered."""
    wait()
    cpu, began = cpu_seconds(), time.perf_counter()
    count = run()
    wait()
    took = time.perf_counter() - began
    cores = (cpu_seconds() - cpu) / took
    return {"requests_per_s": round(count / took, 2), "seconds": round(took, 2), "cpu_cores": round(cores, 2)}


class Images:
    """Hold files and the processor that reads them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.bench, self.new_tokens = Bench(options, folder), options.new_tokens
        photos = write_photos(folder, options.requests + WARM)
        self.files, self.warm = photos[WARM:], photos[:WARM]
        self.sizes = {"min_pixels": 196, "max_pixels": 3136} if options.small else {"max_pixels": WIDTH * HEIGHT}
        assert self.bench.spec.processor is not None
        processor = self.bench.spec.processor(self.bench.config, self.bench.tokenizer, system=None, **self.sizes)
        self.prompts = LoadedProcessor(processor, self.bench.spec, Limits())

    def talk(self, file: Path) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "abcdefgh"}
        return [{"role": "user", "content": [{"type": "image", "image": str(file)}, text]}]

    def ours(self) -> dict[str, Any]:
        longest = self.prompts(self.talk(self.files[0]))["tokens"].numel() + self.new_tokens
        blocks = (len(self.files) + 1) * (longest // 16 + 2)
        limits = EngineLimits(blocks, rows=len(self.files), tokens=16384, encoder_cache_bytes=0)
        engine = Engine(self.bench.model, limits)
        pool = PromptPool(self.prompts)
        try:
            self._answer(engine, pool, self.warm)  # starts the processes, and compiles
            line = measured(lambda: self._answer(engine, pool, self.files))
        finally:
            pool.close()
        return {**line, "prompt_tokens": longest - self.new_tokens, "new_tokens": self.new_tokens}

    def _answer(self, engine: Engine, pool: PromptPool, files: list[Path]) -> int:
        """Answer questions about files; prompts join as they are ready."""
        waiting, answered = [pool.submit(self.talk(file)) for file in files], 0
        while waiting or engine.busy:
            for future in [each for each in waiting if each.done()]:
                waiting.remove(future)
                engine.add(Request(future.result(), max_new_tokens=self.new_tokens, stream=False))
            if not engine.busy:
                time.sleep(0.001)
            for delta in engine.step() if engine.busy else ():
                if delta.finish is not None:
                    if delta.finish.error is not None:
                        raise delta.finish.error
                    answered += 1
        return answered

    @torch.no_grad()
    def transformers(self, count: int, small: bool) -> dict[str, Any]:
        import transformers

        model = transformers_model(self.bench, small)
        vision = self.bench.config.vision  # type: ignore[attr-defined]
        kind: Any = transformers.Qwen2VLImageProcessor
        processor = kind(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            min_pixels=self.sizes.get("min_pixels", 3136),
            max_pixels=self.sizes["max_pixels"],
        )
        tokens = self.prompts(self.talk(self.files[0]))["tokens"]
        image_token = self.bench.config.image_token_id  # type: ignore[attr-defined]

        def run(files: list[Path]) -> int:
            for file in files:
                with Image.open(file) as image:
                    pixels = processor(images=[image.convert("RGB")], return_tensors="pt")
                slots = int(pixels["image_grid_thw"].prod()) // vision.spatial_merge_size**2
                assert slots == int((tokens == image_token).sum()), "both processors make the same number of patches"
                model.generate(
                    input_ids=tokens[None].to(DEVICE),
                    attention_mask=torch.ones_like(tokens)[None].to(DEVICE),
                    mm_token_type_ids=(tokens == image_token).long()[None].to(DEVICE),
                    pixel_values=pixels["pixel_values"].to(DEVICE, self.bench.dtype),
                    image_grid_thw=pixels["image_grid_thw"].to(DEVICE),
                    max_new_tokens=self.new_tokens,
                    min_new_tokens=self.new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            return len(files)

        run(self.files[:1])
        return {**measured(lambda: run(self.files[:count])), "processor": type(processor).__name__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--preset", default="3b")
    parser.add_argument("--small", action="store_true", help="the quick start's model")
    parser.add_argument("--reference", type=int, default=8, help="requests of the loop over transformers; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        images = Images(options, Path(scratch))
        report("ours, images of 2 megapixels", images.ours)
        if options.reference:
            report(
                "transformers, images of 2 megapixels", lambda: images.transformers(options.reference, options.small)
            )


if __name__ == "__main__":
    main()
