"""Convert a synthetic folder between forms: bytes per second beside a plain copy, and peak memory.

    python bench/convert.py [--gigabytes 2] [--jobs N] [--kills 20] [--folder DIR]

One JSON line; partial results go to standard error.

The folder is a Qwen2-VL with random weights in bf16, as large as asked for. Each conversion runs in a
process of its own. With --kills, each of so many conversions, of every form in turn, is killed at a random moment and
started again; the result must be that of one that was not.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tessera
from tessera.checkpoint.publish import MARK
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.models import build_on_meta, resolve
from tessera.runtime import device as devices
from tests.toys.save_folder import save_folder

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # source, target, options
    ("hf", "mm", {"to": "mm", "layout": {"tp": 2}}),
    ("mm", "back", {"like": "hf", "prove": "never"}),  # the proof holds a whole model
    ("hf", "dcp", {"to": "dcp"}),
    ("hf", "same", {"prove": "never"}),
)
KILLED = (*CASES, ("hf", "fp8", {"quantize": "fp8", "prove": "never"}))


def write_folder(folder: Path, gigabytes: float) -> int:
    """Write a folder of about this size, with weights made one at a time, and return its bytes."""
    layers = max(2, round(gigabytes * 1e9 / 2 / (4 * 2048 * 2048 + 3 * 2048 * 8192)))
    changes = {
        "text.hidden_size": 2048,
        "text.intermediate_size": 8192,
        "text.num_hidden_layers": layers,
        "text.num_attention_heads": 16,
        "text.num_key_value_heads": 16,
        "text.head_dim": 128,
        "text.mrope_section": [16, 24, 24],
    }
    spec, config = resolve(ModelSection(family="qwen2_vl", preset="quickstart", config=changes))
    module = build_on_meta(spec, config).to(torch.bfloat16)
    weight_map = spec.main.weight_map(config)
    assert weight_map is not None
    chance = random.Random(0)
    pool = torch.randint(-(2**15), 2**15, (2**27,), dtype=torch.int16)  # drawn once: drawing 20 GB takes minutes
    pool &= ~(1 << 14)  # the first bit of the exponent: all numbers are finite, and have a form in eight bits

    def draw(name: str, blank: torch.Tensor) -> torch.Tensor:
        start = chance.randrange(len(pool) - blank.numel())
        return pool[start : start + blank.numel()].view(blank.dtype).view(blank.shape)

    save_folder(folder, model_tensors(module), weight_map, config.to_hf(), prepare=draw)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Return the seconds of a plain copy, and of one that has reached the disk."""
    began = time.perf_counter()
    shutil.copytree(source, target)
    copied = time.perf_counter()
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return copied - began, time.perf_counter() - began


def copies(root: Path, size: int, when: str, figures: dict[str, float]) -> None:
    """Measure a copy into `figures`; done before and after the conversions, because disks of shared machines vary."""
    plain, synced = copy(root / "hf", root / "copied")
    shutil.rmtree(root / "copied")
    figures[f"copy {when} GB/s"] = round(size / plain / 1e9, 3)
    figures[f"copy to disk {when} GB/s"] = round(size / synced / 1e9, 3)
    tell(figures)


def tell(figures: dict[str, float]) -> None:
    """Print what is known so far, for whoever watches."""
    print(json.dumps(figures), file=sys.stderr, flush=True)


def convert(root: Path, source: str, target: str, options: dict[str, Any], results: Any) -> None:
    """Convert in this process, and report seconds and peak memory."""
    arguments = options | ({"like": root / options["like"]} if "like" in options else {})
    verb = tessera.convert  # which imports everything
    results.put(0)
    began = time.perf_counter()
    verb(root / source, root / target, **arguments)
    results.put((time.perf_counter() - began, devices.memory(torch.device("cpu")).peak))


def in_process(root: Path, source: str, target: str, options: dict[str, Any], kill_at: float | None = None) -> Any:
    """Convert in another process; return its seconds and peak memory, or None if it was killed at so many bytes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tessera.tools.convert"])  # one process imports it, and the others begin from that
    results = context.SimpleQueue()
    process = context.Process(target=convert, args=(root, source, target, options, results))
    process.start()
    results.get()
    while process.is_alive() and (kill_at is None or written(root, target) < kill_at):
        process.join(None if kill_at is None else 0.01)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    assert process.exitcode == 0
    return results.get()


def written(root: Path, target: str) -> int:
    """Return how many bytes of a conversion are written: its files have holes until then."""
    with contextlib.suppress(FileNotFoundError):  # it has just been published
        staged = [path for folder in root.glob(f".staging-{target}~*") for path in folder.rglob("*")]
        return sum(path.stat().st_blocks * 512 for path in staged)
    return 0


def same(folder: Path, other: Path) -> bool:
    """Return whether two folders hold the same files, byte for byte; but for the time in the record of an export."""
    names = [
        sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (folder, other)
    ]
    records = [json.loads((root / MARK).read_text()) for root in (folder, other)]
    for record in records:
        record.pop("written", None)
    return (
        names[0] == names[1]
        and records[0] == records[1]
        and all(filecmp.cmp(folder / name, other / name, shallow=False) for name in names[0] if name != MARK)
    )


def kill(root: Path, number: int, jobs: int | None, chance: random.Random) -> tuple[bool, bool]:
    """Kill a conversion and start it again; return whether it was killed in time, and whether it is the same."""
    source, target, options = KILLED[number % len(KILLED)]
    options = options | {"jobs": jobs}
    if not (root / target).exists():
        in_process(root, source, target, options)
    size = sum(path.stat().st_size for path in (root / target).rglob("*"))
    killed = in_process(root, source, "again", options, chance.uniform(0, size)) is None
    if not (root / "again").exists():
        in_process(root, source, "again", options)
    equal = same(root / target, root / "again")
    shutil.rmtree(root / "again")
    return killed, equal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: for temporary files")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        root = Path(name)
        size = write_folder(root / "hf", flags.gigabytes)
        figures: dict[str, float] = {"gigabytes": round(size / 1e9, 2)}
        copies(root, size, "before", figures)
        for source, target, options in CASES:
            taken, peak = in_process(root, source, target, options | {"jobs": flags.jobs})
            figures[f"{source} to {target} GB/s"] = round(size / taken / 1e9, 3)
            figures[f"{source} to {target} peak GB"] = round(peak / 1e9, 2)
            tell(figures)
            if target != "mm":
                shutil.rmtree(root / target)
        copies(root, size, "after", figures)
        chance = random.Random(0)
        figures["killed"] = figures["same after kills"] = 0
        for number in range(flags.kills):
            killed, equal = kill(root, number, flags.jobs, chance)
            figures["killed"] += killed
            figures["same after kills"] += equal
            tell(figures)
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
