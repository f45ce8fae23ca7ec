"""Embedding and output projection with a vocabulary that may be sharded over tensor-parallel ranks.

An unsharded table is a plain tensor; a sharded one is a `DTensor` with `Shard(0)`. Inputs and outputs are plain
tensors in both cases, the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

# Names of tensor-parallel mesh axes in `parallel.mesh`. A table that is sharded over another axis is an FSDP shard and
# must be gathered before use.
TENSOR_AXES = frozenset({"tp", "tp_outer", "tensor"})


@dataclass(frozen=True)
class VocabPart:
    """Hold this rank's rows [V / ranks, D] of a table. `start`: index of the first row in the unsharded table."""

    rows: Tensor
    start: int
    mesh: DeviceMesh

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def ranks(self) -> int:
        return int(self.mesh.size())

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local row of each token, and whether it is on this rank. Other tokens get row 0."""
        row = tokens - self.start
        local = (row >= 0) & (row < self.rows.shape[0])
        return row.where(local, 0), local


def vocab_part(weight: Tensor) -> VocabPart | None:
    """Return the local rows of a sharded table; None for an unsharded table. Gradients flow back into `weight`."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ()
    assert set(names) <= TENSOR_AXES, f"a table over the axes {names} has to be gathered before it is used"
    assert len(names) == 1, f"a table is sharded over one axis, not over {names}"
    assert weight.placements[0].is_shard(0), f"a table is sharded by rows, not {weight.placements[0]}"
    rows: Tensor = weight.to_local()
    assert rows.shape[0] * mesh.size() == weight.shape[0], "every rank has equally many rows"
    return VocabPart(rows, mesh.get_local_rank() * rows.shape[0], mesh)


def vocab_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows [..., D] of `weight` [V, D] for `tokens` [...].

    Each rank looks up its own rows, and the results are summed. DTensor's embedding would allocate a gradient of the
    size of the unsharded table.
    """
    part = vocab_part(weight)
    if part is None:
        return F.embedding(tokens, weight)
    row, local = part.find(tokens)
    embeddings = F.embedding(row, part.rows).where(local.unsqueeze(-1), 0.0)
    partial = DTensor.from_local(embeddings, part.mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


def vocab_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [T, V] of `hidden` [T, D] and `weight` [V, D], gathered on every rank.

    Losses do not need all logits at once (see `ops.loss`).
    """
    part = vocab_part(weight)
    if part is None:
        return F.linear(hidden, weight)
    entered = DTensor.from_local(hidden, part.mesh, [Replicate()], run_check=False)
    logits = F.linear(entered, weight)
    assert isinstance(logits, DTensor)
    return logits.redistribute(placements=[Replicate()]).to_local()
