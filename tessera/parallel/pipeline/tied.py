"""A table that embeds tokens in one stage and is read by the head in the last one: two copies that stay one weight."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tessera.core.dist import wait_for
from tessera.core.names import clean
from tessera.core.tensors import local_part
from tessera.parallel.axes import PP
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline.stages import Stages
from tessera.parallel.planning.cut import PipelinePlan


class TiedCopies:
    """Both copies begin alike and get the sum of both gradients, so that they take the same steps."""

    def __init__(self, stages: Stages, pipeline: PipelinePlan, mesh: Mesh) -> None:
        self.group = mesh.group(PP)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # at home and copy, both on this rank
        self.apart: list[tuple[Tensor, int]] = []  # one of them, and the position of the rank that has the other
        here, last = stages.here(), len(pipeline.stages) - 1
        for name in pipeline.copies:
            home = pipeline.home(name)
            found = {stage: _parameters(here[stage])[name] for stage in (home, last) if stage in here}
            if len(found) == 2:
                self.pairs.append((found[home], found[last]))
            elif found:
                ((stage, parameter),) = found.items()
                self.apart.append((parameter, pipeline.owner[last if stage == home else home]))

    def sum_gradients(self) -> None:
        for first, second in self.pairs:
            if first.requires_grad:
                _gradient(first).add_(_gradient(second))
                _gradient(second).copy_(_gradient(first))
        for parameter, peer in self.apart:
            if parameter.requires_grad:
                self._exchange(_gradient(parameter), peer)

    def _exchange(self, mine: Tensor, peer: int) -> None:
        """Each sends its own and adds the other's: of two, the sum is the same number on both sides."""
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine.clone(), group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
        ]
        wait_for(dist.batch_isend_irecv(operations))
        mine.add_(theirs)

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Copies on one rank have one name, under which only the one at home is filled: the other follows it."""
        for first, second in self.pairs:
            local_part(second).copy_(local_part(first))
            for key, value in optimizer.state.get(first, {}).items():
                if isinstance(value, Tensor) and key in optimizer.state.get(second, {}):
                    local_part(optimizer.state[second][key]).copy_(local_part(value))


def _parameters(stage: torch.nn.Module) -> dict[str, Tensor]:
    return {clean(name): parameter for name, parameter in stage.named_parameters()}


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
