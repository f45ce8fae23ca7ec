"""The chat set with two answers to each question: the better one is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.toys.chat_set import chat_recipe, write_chat_set


def write_pair_set(folder: Path, samples: int = 24) -> Path:
    """Beside what `write_chat_set` writes: `pairs.jsonl`, and `rated.jsonl` with one answer of each, good or bad."""
    write_chat_set(folder, samples)
    rows: list[dict[str, Any]] = []
    rated: list[dict[str, Any]] = []
    for line in (folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        *question, answer = row["messages"]
        worse = " ".join(reversed(answer["content"].split())) + " old"
        rows.append({"id": row["id"], "messages": question, "chosen": answer, "rejected": worse})
        said = worse if len(rated) % 3 == 0 else answer["content"]
        rated.append({"id": row["id"], "messages": question, "completion": said, "label": len(rated) % 3 > 0})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    return folder


def pair_settings(data: Path) -> dict[str, Any]:
    """What makes the recipe of `chat_recipe` one that learns from pairs."""
    return {
        "data.kind": "preference",
        "data.train": [{"path": str(data / "pairs.jsonl")}],
        "train.task": "dpo",
    }


def pair_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    recipe = chat_recipe(data, out, **train)
    recipe["data"] |= {"kind": "preference", "train": [{"path": str(data / "pairs.jsonl")}], "eval": []}
    recipe["train"]["task"] = "dpo"
    recipe["model"]["lora"] = {"rank": 4}
    return recipe


def rated_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    recipe = pair_recipe(data, out, **train)
    recipe["data"] |= {"kind": "unpaired_preference", "train": [{"path": str(data / "rated.jsonl")}], "length": 512}
    recipe["train"]["task"] = "kto"
    return recipe
