"""A table of tokens whose rows may lie on several ranks: looked up, and multiplied by.

A whole table is a plain tensor. One that is dealt out is a `DTensor` cut along its rows over the ranks that compute a
layer together; what comes in and goes out is a plain tensor then too, the same on all of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

# What `parallel.axes` calls the ranks that compute a layer together. Rows dealt out over other ranks are another
# matter: a shard that was not gathered, of which the hidden states at hand know nothing.
TENSOR_AXES = frozenset({"tp", "tp_rest", "tensor"})


@dataclass(frozen=True)
class VocabPart:
    """This rank's rows of a table: `rows` [V / ranks, D], the first of which is number `start` of the whole."""

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
        """The own row of each token, and whether it is an own one at all; row 0 stands in where it is not."""
        place = tokens - self.start
        own = (place >= 0) & (place < self.rows.shape[0])
        return place.where(own, 0), own


def vocab_part(weight: Tensor) -> VocabPart | None:
    """None: the table is whole. Gradients go back into `weight` as they come, cut as it is."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ()
    assert set(names) <= TENSOR_AXES, f"a table over the axes {names} has to be gathered before it is used"
    assert len(names) == 1, f"a table is dealt out over one axis, not over {names}"
    assert weight.placements[0].is_shard(0), f"a table is cut by rows, not {weight.placements[0]}"
    rows: Tensor = weight.to_local()
    assert rows.shape[0] * mesh.size() == weight.shape[0], "every rank has equally many rows"
    return VocabPart(rows, mesh.get_local_rank() * rows.shape[0], mesh)


def vocab_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [V, D] by number, as `tokens` [...] says: [..., D].

    Each rank looks up what it has. DTensor could do it by itself, but its gradient is as large as the whole table.
    """
    part = vocab_part(weight)
    if part is None:
        return F.embedding(tokens, weight)
    place, own = part.find(tokens)
    found = F.embedding(place, part.rows).where(own.unsqueeze(-1), 0.0)
    joined = DTensor.from_local(found, part.mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    out: Tensor = joined.to_local()
    return out


def vocab_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden` [T, D] times `weight` [V, D]: [T, V], all of it on every rank. A loss has no need of that: see
    `ops.loss`."""
    part = vocab_part(weight)
    if part is None:
        return F.linear(hidden, weight)
    entered = DTensor.from_local(hidden, part.mesh, [Replicate()], run_check=False)
    logits = F.linear(entered, weight)
    assert isinstance(logits, DTensor)
    whole: Tensor = logits.redistribute(placements=[Replicate()]).to_local()
    return whole
