"""Explain an out-of-memory error of the device: describe the micro-batch, and name the recipe key to change."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.callback import TrainerHandle
from tessera.errors import TesseraError, few_names, first_line
from tessera.runtime import device as devices
from tessera.runtime import log
from tessera.training.memory_keys import memory_keys

_COUNTS = ("images", "frames", "patches", "audio_frames")  # keys of `Batch.counts` that the error message lists
_UPDATE = "updating weights"


@dataclass(frozen=True)
class MemoryAdvice:
    """Explain out-of-memory errors of a run, and name a recipe key that lowers its memory."""

    config: RunConfig
    ranks: int = 1
    blocks: Sequence[str] = field(default_factory=tuple)  # paths of modules that can be recomputed

    @contextlib.contextmanager
    def explained(self, trainer: TrainerHandle, microbatches: Sequence[Batch]) -> Iterator[None]:
        """Turn an out-of-memory error inside of the `with` block into a `TesseraError`.

        A run with one rank first saves a checkpoint, if a step is complete and the error is not in an update of the
        weights. With several ranks a save is impossible, because the other ranks
        wait in a collective until the watchdog ends them.
        """
        try:
            yield
        except Exception as error:
            if not devices.is_out_of_memory(error):
                raise
            explained = self.explain(error, trainer, microbatches)
            # Free the tensors of the failed step: only the traceback's stack frames still reference them.
            traceback.clear_frames(error.__traceback__)
            if trainer.world.size == 1 and trainer.step > 0 and trainer.phase != _UPDATE:
                with contextlib.suppress(Exception):
                    trainer.optimizer.zero_grad(set_to_none=True)
                    trainer.save()
            raise explained from error

    def explain(self, error: BaseException, trainer: TrainerHandle, microbatches: Sequence[Batch]) -> TesseraError:
        device, phase = trainer.world.device, trainer.phase
        memory = devices.memory(device)
        at = 0 if len(microbatches) == 1 else trainer.engine.microbatch
        if at is not None and (at >= len(microbatches) or phase == _UPDATE):
            at = None
        batches = list(microbatches) if at is None else [microbatches[at]]
        if phase == _UPDATE:
            what = "while the weights were updated"
        elif at is not None:
            what = f"in micro-batch {at + 1} of {len(microbatches)}: {describe(batches)}"
        else:
            what = f"in one of the micro-batches of the step, together {describe(batches)}"
        ids = few_names([id for batch in batches for id in batch.sample_ids], 4)
        if ids and phase != _UPDATE:
            log.to_file(30, f"samples of the micro-batch that was out of memory: {ids}")
        key, why = self.key(phase)
        return TesseraError(
            f"{devices.name(device)} is out of memory at step {trainer.step + 1}, {what}. "
            f"Peak {memory.peak / 2**30:.1f} of {memory.total / 2**30:.1f} GiB; {first_line(_cause(error))[:200]}",
            where=f"rank {trainer.world.rank}, {phase}" + (f", samples {ids}" if at is not None and ids else ""),
            fix=f"{key} ({why}); docs/how-to/fit-it-into-memory.md has more. `tessera resume RUN {key}` continues",
            code="memory.device-full",
        )

    def key(self, phase: str) -> tuple[str, str]:
        """Return (recipe change, its effect): the cheapest change that lowers memory in this phase."""
        keys = [key for key in memory_keys(self.config, self.ranks, self.blocks) if key.while_training]
        if phase == _UPDATE:
            keys = [key for key in keys if key.lowers == "held"] or keys
        elif phase == "evaluating":  # an evaluation stores no activations for backward
            keys = [key for key in keys if key.lowers == "held"] + keys[-1:]
        return keys[0].text, keys[0].why


def describe(batches: Sequence[Batch]) -> str:
    """Return a text with the numbers of rows, tokens, samples and media of some micro-batches."""
    counts: dict[str, int] = {}
    for batch in batches:
        for name, value in batch.counts.items():
            counts[name] = counts.get(name, 0) + value
    tokens = sum(tensor.numel() for batch in batches if (tensor := batch.get("tokens")) is not None)
    rows = sum(len(batch.rows) for batch in batches)
    parts = [f"{rows:,} row{'s' * (rows != 1)}"] if rows else []
    parts += [f"{tokens or counts.get('tokens', 0):,} tokens"]
    parts += [f"{len(ids):,} samples"] if (ids := [id for batch in batches for id in batch.sample_ids]) else []
    parts += [f"{counts[name]:,} {name}" for name in _COUNTS if counts.get(name)]
    return ", ".join(parts)


def _cause(error: BaseException) -> BaseException:
    """Return the out-of-memory error of the device. Torch's pipeline schedules wrap it into another error."""
    while error.__cause__ is not None and devices.is_out_of_memory(error.__cause__):
        error = error.__cause__
    return error
