"""What combines with what: every pair of features put to the validator.

`python -m tests.coupling` writes the table into docs/reference/layouts.md; a test compares, so that page and
validator cannot drift apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import tessera
from tessera.errors import TesseraError

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "layouts.md"
BEGIN, END = "<!-- coupling: begin -->", "<!-- coupling: end -->"

TEXT = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
VISION_LANGUAGE = {"family": "qwen2_vl", "preset": "quickstart", "config": {"text": TEXT, "tie_word_embeddings": False}}
EXPERTS = {"family": "tests.toys.moe_decoder", "config": {"layers": 4, "balance": 0.0}}
LAYERS = "text.layers.{*}"


@dataclass(frozen=True)
class Feature:
    name: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    needs_experts: bool = False
    needs_encoder: bool = False


FEATURES = [
    Feature("fsdp", {}),
    Feature("hsdp", {"shard": 2}),
    Feature("tp", {"tp": 2}),
    Feature("tp + sequence", {"tp": 2, "sequence_parallel": True}),
    Feature("gpipe, 1f1b", {"pp": 2, "schedule": "1f1b"}),
    Feature("interleaved", {"pp": 2, "schedule": "interleaved", "virtual": 2}),
    Feature("interleaved-zb", {"pp": 2, "schedule": "interleaved-zb", "virtual": 2}),
    Feature("zbv", {"pp": 2, "schedule": "zbv"}),
    Feature("ulysses", {"cp": 2}),
    Feature("ring", {"cp": 2, "ulysses": 1}),
    Feature("ep", {"ep": 2}, needs_experts=True),
    Feature("encoder split", {"tp": 2, "encoders": {"vision": {"tp": 1}}}, needs_encoder=True),
    Feature("recompute", {"recompute": [LAYERS + ".mlp"]}),
    Feature("reentrant", {"recompute": [LAYERS + ".mlp"], "use_reentrant": True}),
    Feature("activation offload", {"activation_offload": [LAYERS + ".attn"]}),
    Feature("offload", {"offload": True}),
    Feature("frozen encoder", {}, {"freeze": ["vision"]}, needs_encoder=True),
]


def refusal(feature: Feature, other: Feature) -> str | None:
    """Why the validator will not have both; None: it will."""
    parallel = {**feature.parallel, **other.parallel}
    world = 4 * prod(parallel.get(degree, 1) for degree in ("tp", "pp", "cp"))
    base = EXPERTS if feature.needs_experts or other.needs_experts else VISION_LANGUAGE
    recipe = {
        "model": {**base, **feature.model, **other.model},
        "data": {"length": 64},
        "train": {"steps": 1, "global_batch": 32},
        "parallel": parallel,
    }
    try:
        tessera.plan(recipe, world=world)
    except TesseraError as error:
        return error.what
    return None


def combines(feature: Feature, other: Feature) -> bool:
    """Return whether two features can be combined: two values of one key are not a combination."""
    if (feature.needs_experts or other.needs_experts) and (feature.needs_encoder or other.needs_encoder):
        return False  # no model has both yet
    return all(other.parallel.get(key, value) == value for key, value in feature.parallel.items())


def table() -> str:
    reasons: dict[str, int] = {}
    lines = ["| |" + "|".join(f" {feature.name} " for feature in FEATURES) + "|", "|---|" + "---|" * len(FEATURES)]
    for row, row_feature in enumerate(FEATURES):
        cells = []
        for column, other in enumerate(FEATURES):
            if column >= row:
                cells.append("")
            elif not combines(row_feature, other):
                cells.append("·")
            else:
                why = refusal(row_feature, other)
                cells.append("yes" if why is None else f"no ({reasons.setdefault(why, len(reasons) + 1)})")
        lines.append(f"| {row_feature.name} |" + "|".join(f" {cell} " for cell in cells) + "|")
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([*lines, "", "· : two values of one key, or no model that has both.", "", *notes])


def in_page(text: str) -> str:
    match = re.search(re.escape(BEGIN) + r"\n(.*?)\n" + re.escape(END), text, re.DOTALL)
    assert match is not None, f"{PAGE.name} has no place for the table"
    return match[1]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(in_page(text), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
