"""Sample with a generation model that is split over several ranks, by weights, layers or tokens.

All ranks call the model with the same full batch and get the full prediction, so callers do not depend on the number of
ranks. Data-parallel ranks share the forward passes of guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.model_plan import Stream
from tessera.core.outputs import LATENTS, Outputs, tensor
from tessera.diffusion.family import GenerationFamily
from tessera.errors import TesseraError
from tessera.parallel.collectives import gathered
from tessera.parallel.mesh import CONTEXT, DATA, Mesh
from tessera.parallel.pipeline_stages import LocalStages, SequentialStages, StageModule
from tessera.parallel.plan import Plan
from tessera.parallel.sequence_sharding import BatchSharding, gathered_order, indices, local_positions, shard_batch

Pass = TypeVar("Pass")


@dataclass(frozen=True)
class PassRanks:
    """Hold the data-parallel ranks that divide the forward passes of a step, with and without the prompt."""

    group: dist.ProcessGroup | None = None
    position: int = 0

    def predict(self, passes: Sequence[Pass], model: Callable[[Pass], Tensor]) -> list[Tensor]:
        """Return the predictions of all forward passes. With enough ranks, each rank computes one pass and gathers the
        others."""
        if self.group is None or len(passes) == 1:
            return [model(inputs) for inputs in passes]
        ranks, count = self.group.size(), len(passes)
        if ranks < count:
            return [model(inputs) for inputs in passes]
        prediction = model(passes[self.position % count])
        return list(gathered(prediction, self.group).chunk(ranks)[:count])


@dataclass
class SharedTokens:
    """Hold the largest number of latent tokens on a rank, and the indices that restore the order of gathered tokens."""

    longest: int
    order: Tensor


@dataclass
class ModelOverRanks:
    """Let callers use a model that is split over ranks as if it were unsharded."""

    module: nn.Module
    family: GenerationFamily
    plan: Plan
    mesh: Mesh
    device: torch.device
    _stages: SequentialStages | None = None
    _layouts: dict[Any, SharedTokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.module, LocalStages):
            self._stages = SequentialStages(self.module, self.plan, self.mesh, self.device)

    @property
    def passes(self) -> PassRanks:
        return PassRanks(self.mesh.group(DATA), self.mesh.position(DATA))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        sharding = self.plan.layout.batch_sharding
        if sharding is None or self.mesh.size(CONTEXT) == 1:
            return self._predict(batch)
        latents = tensor(self._predict(self._sharded(batch, sharding)), LATENTS)
        shared = self._shared(batch, sharding)
        padded = latents.new_zeros(shared.longest, latents.shape[1])
        padded[: len(latents)] = latents
        group = self.mesh.group(CONTEXT)
        assert group is not None, "context parallelism has a process group"
        return {LATENTS: gathered(padded, group).index_select(0, shared.order)}

    def _sharded(self, batch: Batch, sharding: BatchSharding) -> Batch:
        """Return this rank's part of a batch, as in training."""
        length, least = sharding.main.elements(batch), sharding.split.minimum
        if length < least:
            raise TesseraError(
                f"a batch of {length} tokens cannot be split over the ranks: at least {least} are needed",
                where="parallel.cp",
                fix="sample larger images or videos, increase the batch, or lower parallel.cp",
                code="layout.sample-too-small-for-cp",
            )
        part = shard_batch(batch, sharding, self.mesh.position(CONTEXT), {}).to(self.device)
        index = part[Stream.sources("latent_index") if self.family.joint else sharding.main.index]
        changed = {"latents": batch["latents"].index_select(0, index)}
        sources = part.get(Stream.sources("text_index"))
        if self.family.joint and not self.family.whole_text and sources is not None:
            changed["text"] = batch["text"].index_select(0, sources)
        return part.with_tensors(**changed)

    def _shared(self, batch: Batch, sharding: BatchSharding) -> SharedTokens:
        key = tuple((name, segments.lengths) for name, segments in sorted(batch.segments.items()))
        if key not in self._layouts:
            length, split = sharding.main.elements(batch), sharding.split
            ranges = [split.ranges(length, position) for position in range(split.ranks)]
            if self.family.joint:
                places = batch["latent_index"].cpu()
                by_rank = [local_positions(places, parts)[1] for parts in ranges]
            else:
                by_rank = [indices(parts) for parts in ranges]
            order = gathered_order(by_rank, len(batch["latents"]))
            self._layouts[key] = SharedTokens(max(map(len, by_rank)), order.to(self.device))
        return self._layouts[key]

    def _predict(self, batch: Batch) -> Outputs:
        if self._stages is None:
            return self.module(batch)

        def work(stage: StageModule, carry: Tensor | None, mb: int) -> Any:
            out = stage.run(batch, carry)
            return out[LATENTS] if stage.is_last else out

        return {LATENTS: self._stages.share(self._stages.run(work))}
