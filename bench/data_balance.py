"""How even the work of 64 ranks is, packed by length alone and packed by work; how long packing and seeking take.

    python bench/data_balance.py           # Qwen2-VL 2b and 7b, rows of 8k, 16k and 32k tokens
    python bench/data_balance.py --quick   # small, to see that it runs

Prints JSON lines. Nothing is trained: work is the model's own count of FLOPs (`models.qwen2_vl.flops.work`), padding
included. A step is `micro_batches` rows for each rank in the order of training; a rank's work is their sum.
`max_over_mean` is the busiest rank over the mean of its step, averaged over steps; `bound` the heaviest row over the
mean row, as promised at the start of a run; `heaviest_sample` what that could be at best.

The mixture is made up after the shapes that public instruction sets have at Qwen2-VL's own resolution (a token for
28 x 28 pixels): text-only chats (Tulu, OpenHermes: median of 400 tokens, a long tail up to 8k), one picture with
a dialogue (LLaVA-Instruct on COCO: about 400 tokens a picture) or a document (DocVQA, ChartQA: up to 1.8k), two to six
pictures (NLVR2, multi-page documents), seven to twenty small ones (interleaved sets such as M4-Instruct and MMDU), and
clips of 8 to 64 frames (LLaVA-Video, ShareGPT4Video). Shares of the samples are in `KINDS`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.order.order import Order, PackingConfig, Samples, row_table
from tessera.data.order.packing import split_rows
from tessera.models.qwen2_vl import PRESETS, SPEC
from tessera.models.qwen2_vl.config import Qwen2VLConfig

RANKS = 64
TEXT_MOST = 8192  # tokens of a text: published sets are cut there or earlier
# share of the samples, pictures at least and at most, tokens of a picture at least and at most
KINDS: dict[str, tuple[float, int, int, int, int]] = {
    "text": (0.35, 0, 0, 0, 0),
    "one picture": (0.28, 1, 1, 200, 500),
    "one document": (0.12, 1, 1, 500, 1800),
    "several": (0.12, 2, 6, 150, 600),
    "many": (0.05, 7, 20, 100, 350),
    "video": (0.08, 0, 0, 0, 0),
}


def mixture(count: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Measures of about `count` samples; those longer than a row are left out, as the index would."""
    chance = np.random.default_rng(seed)
    kinds = chance.choice(len(KINDS), count, p=[kind[0] for kind in KINDS.values()])
    tokens = np.clip(np.exp(chance.normal(5.4, 0.9, count)), 16, 4000).astype(np.int64)  # words around pictures
    alone = kinds == list(KINDS).index("text")
    tokens[alone] = np.clip(np.exp(chance.normal(6.0, 1.1, int(alone.sum()))), 16, TEXT_MOST).astype(np.int64)
    patches, pairs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for number, (_, least, most, small, large) in enumerate(KINDS.values()):
        of_kind = np.flatnonzero(kinds == number)
        pictures = chance.integers(least, most + 1, len(of_kind))
        for nth in range(most):
            with_picture = of_kind[pictures > nth]
            size = np.exp(chance.uniform(np.log(small), np.log(large), len(with_picture))).astype(np.int64)
            tokens[with_picture] += size + 2
            patches[with_picture] += 4 * size
            pairs[with_picture] += (4 * size) ** 2
    clips = np.flatnonzero(kinds == list(KINDS).index("video"))
    frames, size = chance.integers(4, 33, len(clips)), chance.integers(60, 200, len(clips))  # pairs of frames
    tokens[clips] += frames * size + 2
    patches[clips] += 4 * frames * size
    pairs[clips] += frames * (4 * size) ** 2
    fits = tokens <= length
    return {"tokens": tokens[fits], "patches": patches[fits], "patch_pairs": pairs[fits]}


def samples_of(measures: dict[str, np.ndarray], preset: str) -> Samples:
    config = Qwen2VLConfig.model_validate(PRESETS[preset])
    assert SPEC.work is not None
    token = {name: np.array([int(name == "tokens")]) for name in measures}
    token_work = {stream: float(flops[0]) for stream, flops in SPEC.work(config, token).items()}
    tokens = measures["tokens"]
    return Samples(tokens, np.array([0, len(tokens)]), None, SPEC.work(config, measures), token_work)


def work_of_rows(order: Order, samples: Samples, length: int) -> np.ndarray:
    """Counted again from the samples of each row, by place in the table."""
    linear = sum(samples.token_work.values())
    excess = sum(samples.work.values()) - linear * samples.tokens
    members, bounds = order.table.arrays["members"], order.table.arrays["bounds"]
    return linear * length + np.add.reduceat(excess[members], bounds[:-1])


def heaviest_sample(samples: Samples, length: int) -> float:
    """Work of a row with this one sample and otherwise nothing but padding: no packing has a lighter heaviest row."""
    linear = sum(samples.token_work.values())
    return float(linear * length + (sum(samples.work.values()) - linear * samples.tokens).max())


def steps(order: Order, by_place: np.ndarray, micro_batches: int, dealt: bool) -> Iterator[float]:
    """The busiest rank over the mean, of each step of the first pass."""
    rows = RANKS * micro_batches
    for first in range(0, len(order) - rows + 1, rows):
        weights = by_place[[order.index(row)[1] for row in range(first, first + rows)]]
        row_work = order.work(range(first, first + rows)) if dealt else None
        totals = weights[split_rows(row_work, rows, RANKS, 1)].sum(axis=(1, 2))
        yield float(totals.max() / totals.mean())


def compare(preset: str, length: int, count: int) -> Iterator[dict[str, Any]]:
    samples = samples_of(mixture(count, length), preset)
    for balance in (False, True):
        began = time.perf_counter()
        table = row_table(samples, PackingConfig(length, balance=balance))
        seconds = time.perf_counter() - began
        order = Order(table, 0)
        by_place = work_of_rows(order, samples, length)
        floor = heaviest_sample(samples, length) / by_place.mean()
        for micro_batches in (1, 4):
            ratios = np.array(list(steps(order, by_place, micro_batches, balance)))
            yield {
                "case": "balanced" if balance else "plain",
                "preset": preset,
                "length": length,
                "ranks": RANKS,
                "micro_batches": micro_batches,
                "samples": len(samples.tokens),
                "rows": len(order),
                "steps": len(ratios),
                "max_over_mean": round(float(ratios.mean()), 4),
                "worst_step": round(float(ratios.max()), 4),
                "share_of_steps_over_1.05": round(float((ratios > 1.05).mean()), 4),
                "bound": round(table.stats.work or 0.0, 4),
                "heaviest_sample": round(floor, 4),
                "padding": round(table.stats.padding, 4),
                "pack_seconds": round(seconds, 2),
            }


def pack_and_seek(count: int) -> dict[str, Any]:
    """A weighted mixture, its table kept and mapped; the seek is that of a fresh process: open, then one row."""
    samples = samples_of(mixture(count, 16384), "2b")
    half = len(samples.tokens) // 3
    samples = replace(samples, starts=np.array([0, half, len(samples.tokens)]), weights=(1.0, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        row_table(samples, PackingConfig(16384), Path(folder))
        packed = time.perf_counter() - began
        began = time.perf_counter()
        order = Order(row_table(samples, PackingConfig(16384), Path(folder)), 0)
        opened = time.perf_counter() - began
        times = []
        for step in (10**9, 10**9 + 1, 10**9 + 2, 5 * 10**9):
            began = time.perf_counter()
            order.samples(step * RANKS)
            times.append(time.perf_counter() - began)
    return {
        "case": "pack and seek",
        "samples": len(samples.tokens),
        "pack_seconds": round(packed, 2),
        "seconds_per_million": round(packed / len(samples.tokens) * 1e6, 2),
        "open_seconds": round(opened, 3),
        "seek_step_1e9_ms": round(times[0] * 1e3, 3),
        "seek_worst_ms": round(max(times) * 1e3, 3),
    }


def main(quick: bool) -> None:
    count, lengths = (20_000, (16384,)) if quick else (200_000, (8192, 16384, 32768))
    for preset in ("2b", "7b"):
        for length in lengths:
            for line in compare(preset, length, count):
                print(json.dumps(line), flush=True)
    print(json.dumps(pack_and_seek(20_000 if quick else 1_000_000)), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
