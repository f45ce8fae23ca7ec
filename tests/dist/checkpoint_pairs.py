"""Six layouts, each saved and resumed under each: 36 pairs. `run` gives the worst difference of losses."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

from tessera.training.run import resume, train
from tests.dist.spawn import run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import MODEL, chat_recipe, write_chat_set

STEPS, SAVED = 4, 2
WORDS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp 2": (2, {}),
    "tp 2 + sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "pp 2 interleaved": (2, {"pp": 2, "virtual": 2}),
    "cp 2 ring x fsdp 2": (4, {"cp": 2, "ulysses": 1}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
}
PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS]


def recipe_of(folder: Path, out: Path) -> dict[str, Any]:
    recipe = chat_recipe(folder / "data", out, steps=STEPS)
    recipe["model"]["config"] = {**MODEL, "text": {**MODEL["text"], **WORDS}}
    recipe["data"]["eval"] = []
    recipe["checkpoint"] = {"every": 0, "at_end": True}
    recipe["log"] = {"every": 1}
    recipe["optim"]["eps"] = 1e-3  # see tests/dist/layouts.py
    return recipe


def losses(folder: Path) -> list[float]:
    from tessera.runtime.files import read_jsonl

    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if row["kind"] == "train"]


def save(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """All layouts of one number of ranks, one after another in the same processes."""
    with contextlib.redirect_stderr(io.StringIO()):
        for name in names:
            recipe = recipe_of(folder, folder / "saved" / slug(name))
            train(recipe, {"parallel": LAYOUTS[name][1]}, callbacks=[StopAt(SAVED)])


def go_on(rank: int, world: int, folder: Path, pairs: list[tuple[str, str]]) -> None:
    """All pairs of one number of ranks, one after another in the same processes."""
    with contextlib.redirect_stderr(io.StringIO()):
        for source, target in pairs:
            resume(place(folder, source, target) / "chat", {"parallel": LAYOUTS[target][1]})


def place(folder: Path, source: str, target: str) -> Path:
    return folder / "resumed" / f"{slug(source)}-to-{slug(target)}"


def slug(name: str) -> str:
    return name.replace(" ", "-").replace("+", "and")


def run(pairs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], float]:
    """The worst relative difference from a run that was never interrupted, by pair."""
    write_chat_set(folder / "data")
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe_of(folder, folder / "whole"))
    right = losses(folder / "whole" / "chat")
    sources = dict.fromkeys(source for source, _ in pairs)
    for world in sorted({LAYOUTS[source][0] for source in sources}):
        run_ranks(save, world, folder, [source for source in sources if LAYOUTS[source][0] == world])
    for source, target in pairs:
        shutil.copytree(folder / "saved" / slug(source), place(folder, source, target))
    for world in sorted({LAYOUTS[target][0] for _, target in pairs}):
        here = [pair for pair in pairs if LAYOUTS[pair[1]][0] == world]
        run_ranks(go_on, world, folder, here, timeout=30.0 + 20.0 * len(here))
    differences = {}
    for pair in pairs:
        curve = losses(place(folder, *pair) / "chat")
        assert len(curve) == len(right) == STEPS
        differences[pair] = max(abs(a - b) / abs(b) for a, b in zip(curve, right, strict=True))
    return differences
