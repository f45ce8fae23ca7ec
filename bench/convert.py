"""Convert a synthetic folder to Megatron-style shards and back: bytes per second beside a plain copy, and peak memory.

    python bench/convert.py [--gigabytes 2]

One JSON line. The folder is a Qwen2-VL with random weights in bf16, as large as asked for.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch

import tessera
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.state import model_tensors
from tessera.core.run_config import ModelSection
from tessera.models import build_on_meta, resolve


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
    save_folder(
        folder,
        model_tensors(module),
        weight_map,
        config.to_hf(),
        prepare=lambda name, blank: torch.randn(blank.shape).to(blank.dtype),
    )
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size = write_folder(root / "hf", asked.gigabytes)
        times = {}
        for case, work in (
            ("copy", lambda: shutil.copytree(root / "hf", root / "copied")),
            ("to shards", lambda: tessera.convert(root / "hf", root / "mm", to="mm", layout={"tp": 2})),
            ("to hf", lambda: tessera.convert(root / "mm", root / "back", like=root / "hf")),
        ):
            began = time.perf_counter()
            work()
            times[case] = time.perf_counter() - began
            if case == "copy":
                shutil.rmtree(root / "copied")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {f"{case}, GB/s": round(size / seconds / 1e9, 3) for case, seconds in times.items()}
        print(json.dumps({"gigabytes": round(size / 1e9, 2), **found, "peak GB": round(peak / 1e9, 2)}))


if __name__ == "__main__":
    main()
