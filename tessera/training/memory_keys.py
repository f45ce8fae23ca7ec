"""List the changes of a recipe that lower its device memory, those that slow training least first."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tessera.config.run_config import RunConfig
from tessera.optim.optimizer import NOT_OFFLOADED


@dataclass(frozen=True)
class MemoryKey:
    """Hold a change of a recipe that lowers its device memory: recipe keys with new values, and the effect."""

    settings: dict[str, Any]
    why: str
    lowers: Literal["step", "held"]  # "step": activations; "held": weights and optimizer state
    while_training: bool = True  # whether an existing run can be resumed with the change

    @property
    def text(self) -> str:
        """Return the change in the syntax of the command line."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.settings.items())


def _word(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if isinstance(value, (bool, int, float)) else text.strip('"') if isinstance(value, str) else f"'{text}'"


def memory_keys(config: RunConfig, ranks: int, blocks: Sequence[str]) -> list[MemoryKey]:
    """Return changes of recipe keys, each of which lowers the memory of the run.

    `blocks`: paths of modules that parallel.recompute can name.
    """
    train, parallel, lora = config.train, config.parallel, config.model.lora
    keys: list[MemoryKey] = []
    if train.micro_batch > 1:
        fewer = max(n for n in range(1, train.micro_batch) if train.micro_batch % n == 0)
        why = "fewer rows in a pass and more passes in a step: the same result"
        keys.append(MemoryKey({"train.micro_batch": fewer}, why, "step"))
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", path) for path in blocks))
    recomputed = any(isinstance(entry, str) or entry.keep == "none" for entry in parallel.recompute)
    if patterns and not recomputed:
        why = "activations are computed again in backward: the same result"
        keys.append(MemoryKey({"parallel.recompute": patterns}, why, "step"))
    if not (parallel.shard == "auto" or parallel.shard == ranks or ranks == 1):
        why = "all ranks share weights, gradients and optimizer state"
        keys.append(MemoryKey({"parallel.shard": "auto"}, why, "held"))
    if lora is not None and lora.quantize is None:
        why = "weights below adapters are kept in four bits (QLoRA)"
        keys.append(MemoryKey({"model.lora.quantize": "nf4"}, why, "held", while_training=False))
    if lora is not None and not parallel.block_offload and patterns:
        settings = {"parallel.block_offload": True, **({} if recomputed else {"parallel.recompute": patterns})}
        why = "frozen weights wait in host memory and come one block ahead of their use"
        keys.append(MemoryKey(settings, why, "held"))
    if not parallel.offload and config.optim.name not in NOT_OFFLOADED:
        why = "weights and optimizer state wait in host memory, and steps take longer"
        keys.append(MemoryKey({"parallel.offload": True}, why, "held"))
    if lora is None:
        why = "adapters are trained in place of all weights"
        keys.append(MemoryKey({"model.lora": {}}, why, "held", while_training=False))
    shorter = max(1, config.data.length // 2)
    keys.append(MemoryKey({"data.length": shorter}, "shorter rows; longer samples are left out", "step"))
    return keys
