"""Check what a resumed run has in common with the one that saved, and report what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.errors import TesseraError
from tessera.runtime import log


def check_resumed(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise where a run cannot go on from a checkpoint; log what is allowed to differ, and what follows from it.

    `before`, `now`: see `Trainer.state_dict`; of the checkpoint, and of the trainer before it is restored.
    """
    if before["seed"] != now["seed"]:
        raise TesseraError(
            f"the run was trained with train.seed={before['seed']}, now it is {now['seed']}: "
            "the data order would change in the middle",
            where="train.seed",
            fix=f"set train.seed={before['seed']}",
        )
    if before.get("data") and not set(str(before["data"]).split("/")) & set(str(now["data"]).split("/")):
        log.logger().warning(
            "the data, or the way it is packed, has changed since step %d was saved: rows hold other samples now, "
            "of which some may come again and some not in this pass",
            step,
        )
    old, new = dict(before["schedule"]), dict(now["schedule"])
    if old.get("kind") == new["kind"] == "constant":
        new.pop("steps")  # a constant rate does not ask how long the run is
    changed = [f"{key} {old[key]} -> {new[key]}" for key in new if key in old and old[key] != new[key]]
    if changed:
        log.logger().warning(
            "the schedule has changed since step %d was saved (%s): the learning rate goes on from its new value",
            step,
            ", ".join(changed),
        )
    if before["world"] != now["world"]:
        log.logger().info(
            "world size was %d and is %d now: samples and their order are the same, sums are so to rounding",
            before["world"],
            now["world"],
        )
