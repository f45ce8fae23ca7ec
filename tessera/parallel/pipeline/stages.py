"""A model in pieces: for each stage of a pipeline a copy of it that lacks what lies elsewhere, under the same names."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from tessera.parallel.axes import PP
from tessera.parallel.mesh import Mesh
from tessera.parallel.plan import Plan


class Work(Protocol):
    """What is done with a stage's model: a step of training, an evaluation, a token."""

    def __call__(self, stage: Stage, carry: Tensor | None, mb: int) -> Any: ...


class Stage(nn.Module):
    """One stage: a model without the parts that lie elsewhere. `core.names.clean` takes `_stage_model` out of names.

    Its forward pass is whatever `work` says, so that all of it, also a loss that reads the head's weight, happens while
    the weights of the stage are gathered.
    """

    def __init__(self, model: nn.Module, number: int, count: int) -> None:
        super().__init__()
        self._stage_model = model
        self.number = number
        self.is_first = number == 0
        self.is_last = number == count - 1
        self.work: Work | None = None

    def forward(self, carry: Tensor | None, mb: int) -> Any:
        assert self.work is not None, "a stage does not know by itself what to do with its model"
        return self.work(self, None if self.is_first else carry, mb)

    def run(self, batch: Any, carry: Tensor | None, **options: Any) -> Any:
        """The model of this stage, for `work`."""
        return self._stage_model(batch, carry=carry, **options)


class Stages(nn.Module):
    """The stages of this rank, as one module with the names of the whole model."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"_stage{stage.number}", stage)
        # A family says how parameters begin by name alone, so any part of it can answer for all.
        start = getattr(stages[0]._stage_model, "initialize", None)
        if start is not None:
            self.initialize = start

    def __iter__(self) -> Iterator[Stage]:
        return iter(cast(list[Stage], list(self.children())))

    def here(self) -> dict[int, Stage]:
        """By number."""
        return {stage.number: stage for stage in self}


def cut_stages(module: nn.Module, plan: Plan, mesh: Mesh) -> Stages:
    pipeline = plan.pipeline
    assert pipeline is not None
    chain = [path for stage in pipeline.stages for path in stage.modules]
    stages = []
    for number in pipeline.stages_of(mesh.position(PP)):
        model = copy.deepcopy(module)
        remove_others(model, chain, set(pipeline.modules_of(number)))
        stages.append(Stage(model, number, len(pipeline.stages)))
    return Stages(stages)


def remove_others(model: nn.Module, chain: Collection[str], kept: Collection[str]) -> None:
    """Of the modules of the chain only the kept ones stay; a module around links of which none is kept goes as well."""
    around = {path[:at] for path in chain for at, letter in enumerate(path) if letter == "."}
    bare = [path for path in around if not any(link.startswith(path + ".") for link in kept)]
    for path in sorted({*chain, *bare} - set(kept), key=len, reverse=True):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        # A list stays, empty: whoever has it goes through its members.
        if not isinstance(getattr(owner, name), (nn.ModuleList, nn.ModuleDict)):
            setattr(owner, name, None)
