"""List what a recipe may set with `framework: mindspore`, and refuse or switch off everything else by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera.config.parallel import LossScaleSection
from tessera.errors import TesseraError, few_names

Framework = Literal["torch", "mindspore"]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_vl")  # model families that are written for MindSpore


@dataclass(frozen=True)
class Limit:
    """Name a key, the values that MindSpore supports, and the reason for users."""

    key: str
    values: tuple[Any, ...]  # supported values; `without_unsupported` sets the first
    what: str
    essential: bool = False  # whether the trained result depends on the key; it is then never changed


LIMITS = (
    Limit("train.device", ("auto", "cpu"), "torch's part of the run is on the host; MindSpore chooses its own device"),
    Limit("train.task", (None, "language"), "only the language objective is written for MindSpore", essential=True),
    Limit("train.task_options", ({},), "noise on embeddings", essential=True),
    Limit("train.ema", (None,), "averaged weights", essential=True),
    Limit("train.generate_every", (0,), "generation during training"),
    Limit("train.preview", (None,), "generated samples"),
    Limit("train.callbacks", ([],), "callbacks of recipes, which read torch's weights and gradients", essential=True),
    Limit("evaluation.tasks", ([],), "benchmarks during training"),
    Limit("model.head", (None, "language"), "reward heads", essential=True),
    Limit("model.lora.dropout", (0.0,), "dropout of adapters", essential=True),
    Limit("model.lora.dora", (False,), "DoRA", essential=True),
    Limit("model.lora.init", ("default",), "PiSSA", essential=True),
    Limit("model.lora.quantize", (None,), "quantized base weights"),
    Limit("parallel.backend", ("fsdp2",), "defaults for sharded weights"),
    Limit("parallel.tp", (1,), "tensor parallelism: MindSpore trains with data parallelism alone"),
    Limit("parallel.sequence_parallel", (False,), "sequence parallelism"),
    Limit("parallel.pp", (1,), "pipeline parallelism"),
    Limit("parallel.schedule", (None,), "pipeline schedules"),
    Limit("parallel.virtual", (None,), "pipeline stages"),
    Limit("parallel.layers", (None,), "pipeline stages"),
    Limit("parallel.cp", (1,), "context parallelism"),
    Limit("parallel.ulysses", (None,), "context parallelism"),
    Limit("parallel.ep", (1,), "expert parallelism"),
    Limit("parallel.encoders", ({},), "layouts of encoders"),
    Limit("parallel.fsdp2_config", (None,), "FSDP2"),
    Limit("parallel.shard", ("auto", 1), "sharded weights: every rank has all of them"),
    Limit("parallel.wrap", (None,), "sharded weights"),
    Limit("parallel.ignore", ([],), "sharded weights"),
    Limit("parallel.reshard_after_forward", (None,), "sharded weights"),
    Limit("parallel.prefetch_forward", (0,), "sharded weights"),
    Limit("parallel.prefetch_backward", (0,), "sharded weights"),
    Limit("parallel.accumulate", (None,), "gradient reductions of micro-batches: they are summed once per step"),
    Limit("parallel.recompute", ([],), "recomputed activations"),
    Limit("parallel.use_reentrant", (False,), "recomputed activations"),
    Limit("parallel.activation_offload", ([],), "offloaded activations"),
    Limit("parallel.compile", (False,), "torch's compiler"),
    Limit("parallel.block_offload", (False,), "offloaded weights"),
    Limit("parallel.offload", (False,), "offloaded weights"),
    Limit("parallel.pin_memory", (True,), "offloaded weights"),
    Limit("precision.weights", ("float32",), "weights in bfloat16"),
    Limit("precision.compute", ("auto", "float32"), "computation in 16 bits"),
    Limit("precision.reduce", ("float32",), "gradient reductions in 16 bits"),
    Limit("precision.output", (None, "float32"), "outputs in 16 bits"),
    Limit("precision.cast_inputs", (False,), "casts to the dtype of computation"),
    Limit("precision.modules", ({},), "dtypes of modules"),
    Limit("precision.loss_scale", (LossScaleSection().model_dump(),), "computation in 16 bits"),
    Limit("optim.name", ("adamw",), "other optimizers than AdamW", essential=True),
    Limit("guard.blame", ("auto", "never"), "the search for the module that caused a bad step"),
    Limit("guard.probes", (64,), "the search for the samples that caused a bad step"),
    Limit("guard.coverage", ("auto", "off"), "the check of torch's gradients in the first step"),
    Limit("profile.steps", (None,), "torch's profiler"),
)


# Settings of the host part of a run on MindSpore. No recipe key changes them.
HOST_SETTINGS: Mapping[str, Any] = {
    "train.device": "cpu",
    "parallel.shard": 1,
    "precision.compute": "float32",
    "guard.blame": "never",
    "guard.coverage": "off",
}


def check_framework(values: Mapping[str, Any]) -> None:
    """Raise if a recipe for MindSpore uses something that is not available there. `values`: the recipe as a mapping."""
    lacking = unsupported(values)
    if not lacking:
        return
    first = lacking[0]
    also = f"; also {few_names([limit.key for limit in lacking[1:]])}" if len(lacking) > 1 else ""
    raise TesseraError(
        f"{first.key}={_at(values, first.key)!r} is not available on MindSpore: {first.what}{also}",
        where=first.key,
        allowed=[str(value) for value in first.values],
        fix="set the key to this value, or leave framework out to train on torch",
        code="framework.feature-not-available",
    )


def unsupported(values: Mapping[str, Any]) -> list[Limit]:
    """Return each `Limit` that a recipe, or a part of one, does not respect."""
    return [limit for limit in LIMITS if _at(values, limit.key, limit.values[0]) not in limit.values]


def without_unsupported(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Limit, Any]]]:
    """Return a recipe without the features that MindSpore lacks, and the limit and the former value of each of them.

    Features that change the trained result are not switched off: `check_framework` refuses them.
    """
    recipe = _copied(values)
    switched_off = [(limit, _at(recipe, limit.key)) for limit in unsupported(values) if not limit.essential]
    for limit, _ in switched_off:
        _set(recipe, limit.key, limit.values[0])
    return recipe, switched_off


def _at(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    at: Any = values
    for part in key.split("."):
        if not isinstance(at, Mapping) or part not in at:
            return default
        at = at[part]
    return at


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    at = values
    for part in path:
        at = at[part]
    at[last] = value


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
