"""Checkpoints of somebody else, whose hashes are right: links, tables and states that no run writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.checkpoint.files import MANIFEST, Manifest, hash_file, read_manifest
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.storage import TABLE
from tessera.config.output import GuardSection
from tessera.config.run_length import RunLength
from tessera.observe.anomaly.guard import Guard
from tessera.training.saves import check_resumed, restore_callbacks, restoring
from tests.errors import raises


def blank() -> dict[str, torch.Tensor]:
    return {"model.weight": torch.zeros(6, 4)}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    weights = {"model.weight": torch.arange(24.0).view(6, 4)}
    return CheckpointManager(tmp_path / "checkpoints", 1).save(1, weights, {}, "")


def rewrite(checkpoint: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a checkpoint, and hash it again."""
    content = json.loads((checkpoint / name).read_text())
    change(content)
    (checkpoint / name).write_text(json.dumps(content))
    manifest = read_manifest(checkpoint)
    records = tuple(hash_file(checkpoint / record.name) for record in manifest.files)
    (checkpoint / MANIFEST).write_bytes(Manifest(manifest.step, manifest.serial, records).to_json())


@pytest.mark.parametrize("offset", [-3, 3, 500])
def test_chunks_outside_of_their_tensor_are_refused(offset: int, stored: Path) -> None:
    def shift(table: Any) -> None:
        table["tensors"]["model.weight"]["chunks"][0]["offsets"][0] = offset

    rewrite(stored, TABLE, shift)
    with raises("checkpoint.parts-incomplete", "model.weight"):
        CheckpointManager(stored.parent, 1).resume(blank())


def test_chunks_that_overlap_are_refused(stored: Path) -> None:
    def overlap(table: Any) -> None:
        chunk = table["tensors"]["model.weight"]["chunks"][0]
        halves = [chunk | {"offsets": [start, 0], "shape": [3, 4]} for start in (0, 2)]
        table["tensors"]["model.weight"]["chunks"] = halves

    rewrite(stored, TABLE, overlap)
    with raises("checkpoint.parts-incomplete", "model.weight"):
        CheckpointManager(stored.parent, 1).resume(blank())


def test_a_shard_behind_a_link_out_of_the_checkpoint_is_refused(stored: Path, tmp_path: Path) -> None:
    shard = stored / "shard-00000.safetensors"
    shard.rename(tmp_path / "away")
    shard.symlink_to(tmp_path / "away")
    with raises("weights.link-out-of-folder", shard.name):
        CheckpointManager(stored.parent, 1).resume(blank())
    with raises("weights.link-out-of-folder", shard.name):
        CheckpointManager(stored.parent, 1).load(stored, blank())
    shard.unlink()
    (tmp_path / "away").rename(stored / "inside")
    shard.symlink_to("inside")
    assert CheckpointManager(stored.parent, 1).resume(blank()) is not None


STATE = {"seed": 1, "schedule": {"kind": "constant", "steps": 2}, "world": 1, "data": "", "callbacks": {}}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": None}, "seed"),
        ({"schedule": 3}, "schedule"),
        ({"world": "x"}, "world"),
        ({"callbacks": []}, "callbacks"),
    ],
)
def test_a_value_of_another_type_in_the_state_is_named(change: Mapping[str, Any], key: str) -> None:
    with raises("checkpoint.state-not-restored", key):
        check_resumed(1, {**STATE, **change}, STATE)
    with raises("checkpoint.state-not-restored", "seed"):
        check_resumed(1, {"a": 1}, STATE)


@pytest.mark.parametrize("state", [3, ["a"], {"loss": {"recent": ["a"]}}, {"spikes": "x"}, {"left_out": 1}])
def test_a_state_of_a_callback_that_it_cannot_restore_is_named(state: Any) -> None:
    guard = Guard(GuardSection())
    with raises("checkpoint.state-not-restored", f"callbacks.{guard.name}"):
        restore_callbacks([guard], {guard.name: state})


@pytest.mark.parametrize("rows", ["x", None, -5, 1e308, float("nan"), [1]])
def test_a_position_in_the_data_that_is_none_is_refused(rows: Any) -> None:
    length = RunLength(steps=2, rows_per_step=1, rows_per_epoch=None)
    with raises("checkpoint.state-not-restored", "rows_drawn"), restoring("rows_drawn"):
        length.row_after({"rows_drawn": rows})
    assert length.row_after({"rows_drawn": 5}) == 5
