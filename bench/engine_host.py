"""Time of the host for each step of the engine: a stand-in for the model answers at once.

    python bench/engine_host.py                  # 64 requests with 300 tokens of prompt, 128 new tokens
    python bench/engine_host.py --profile

One JSON line per case: "plain" reads the text of an answer at its end, "streamed" the text of each token, "stop
strings" searches it, too. `ms_per_step`: median CPU time of the steps in which all requests get a token. A device
that is faster waits for the host.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conversations import SPECIAL
from torch import Tensor, nn

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheStep
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.nn.cache import KVCache

VOCABULARY, PROMPT = 511, 300


class Instant:
    """Return logits that do not depend on the batch, but differ from call to call."""

    def __init__(self) -> None:
        self._choices = torch.randint(0, VOCABULARY - len(SPECIAL), (1009, 1024)).unbind()
        self._logits = torch.eye(VOCABULARY)
        self._calls = 0

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        cache = KVCache(blocks, block_size)
        cache.allocate(0, torch.zeros(1, 1, 1))
        return cache

    def __call__(self, batch: Batch, logits: str, cache: KVCache, step: CacheStep) -> dict[str, Tensor]:
        self._calls += 1
        return {"logits": self._logits[self._choices[self._calls % 1009][: len(step.last)]]}


@dataclass(frozen=True)
class Model:
    """Hold what an engine needs of a model."""

    generator: Any
    processor: Any
    module: nn.Module
    device: torch.device
    over_ranks: bool = False


def processor(folder: Path) -> Any:
    """Return the processor of the quick start's model: it decodes answers."""
    words = [f"<|{word}|>" for word in SPECIAL]
    texts = ["the cat sat on the mat and read the end of it "] * 9
    train_tokenizer(texts, VOCABULARY, words).save(str(folder / "tokenizer.json"))
    section = {"family": "qwen2_vl", "preset": "quickstart", "tokenizer": str(folder)}
    spec, config = resolve(ModelSection.model_validate(section))
    assert spec.processor is not None
    return spec.processor(config, folder, system=None)


def run(engine: Engine, options: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    positions = torch.arange(PROMPT).expand(3, -1)
    for _ in range(options.requests):
        tokens = torch.randint(0, VOCABULARY, (PROMPT,), generator=chance)
        prompt = Batch({"tokens": tokens, "positions": positions}, {"text": Segments.of([PROMPT])})
        engine.add(Request(prompt, max_new_tokens=options.new_tokens, **fields))
    times, began = [], time.perf_counter()
    while engine.busy:
        before = time.thread_time()
        deltas = engine.step()
        if len(deltas) == options.requests:
            times.append(time.thread_time() - before)
    return {
        "ms_per_step": round(statistics.median(times) * 1e3, 3),
        "mean_ms": round(statistics.fmean(times) * 1e3, 3),
        "seconds": round(time.perf_counter() - began, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="print the functions that take most time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = options.requests * ((PROMPT + options.new_tokens) // 16 + 2)
    limits = EngineLimits(blocks, rows=options.requests, tokens=32768)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Instant(), processor(Path(folder)), nn.Module(), torch.device("cpu"))
    engine = Engine(model, limits)
    cases: dict[str, dict[str, Any]] = {
        "plain": {"stream": False},
        "streamed": {},
        "stop strings": {"stop": ("END", "stop")},
    }
    run(engine, options, {})
    for name, fields in cases.items():
        line = {"case": f"host, {options.requests} rows, {name}", **run(engine, options, fields)}
        print(json.dumps(line), flush=True)
    if options.profile:
        record = cProfile.Profile()
        record.runcall(run, engine, options, {})
        pstats.Stats(record).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
