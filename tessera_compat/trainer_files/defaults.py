"""State the defaults of other trainers that differ from those of a recipe: they apply to keys that a file lacks.

LLaMA-Factory and axolotl take those of the transformers Trainer. Sources: TrainingArguments of transformers 5.22,
LLaMA-Factory's hparams, the command line parameters of ms-swift 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNERS = ("finetuning_type", "train_type", "tuner_type", "adapter")
_TRAINER = {"adam_beta1": 0.9, "adam_beta2": 0.999, "learning_rate": 5e-5, "num_train_epochs": 3.0}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LLaMA-Factory": {
        **_TRAINER, "finetuning_type": "lora", "lr_scheduler_type": "linear", "per_device_train_batch_size": 8,
    },
    "ms-swift": {
        "tuner_type": "lora", "learning_rate": 1e-4, "weight_decay": 0.1, "num_train_epochs": 3.0,
        "per_device_train_batch_size": 1,
    },
    "axolotl": {"adam_beta1": 0.9, "adam_beta2": 0.999},
}  # fmt: skip
_SWIFT_SAMPLES = 16  # ms-swift accumulates gradients until a step has at least this number of samples


def defaults_of(trainer: str, settings: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Return the keys that are missing in a file, with the defaults of its trainer."""
    written = {key for key, value in settings.items() if value is not None}
    added = {key: value for key, value in _DEFAULTS.get(trainer, {}).items() if key not in written}
    if written & set(TUNERS):
        added = {key: value for key, value in added.items() if key not in TUNERS}
    steps = settings.get("max_steps")
    if "num_epochs" in written or (isinstance(steps, int) and steps > 0):
        added.pop("num_train_epochs", None)
    values = {**added, **{key: settings[key] for key in written}}
    adapted = any(str(values.get(key)) in ("lora", "qlora") for key in TUNERS)
    if trainer == "LLaMA-Factory" and adapted and not written & {"lora_alpha", "adapter_name_or_path"}:
        rank = settings.get("lora_rank")
        rank = rank if isinstance(rank, int) and not isinstance(rank, bool) else 8
        added |= {"lora_alpha": 2 * rank, **({} if "lora_rank" in written else {"lora_rank": rank})}
    if trainer == "ms-swift":
        if adapted and "adapters" not in written:
            swift_lora = {"lora_rank": 8, "lora_dropout": 0.05}
            added |= {key: value for key, value in swift_lora.items() if key not in written}
        elif "learning_rate" in added and not adapted:
            added["learning_rate"] = 1e-5
        rows = values["per_device_train_batch_size"]
        if "gradient_accumulation_steps" not in written and isinstance(rows, int) and rows > 0:
            added["gradient_accumulation_steps"] = -(-_SWIFT_SAMPLES // (rows * world))
    return added
