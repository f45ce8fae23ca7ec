"""Every layout and memory form trains like one process; encoders that a rank's batch leaves idle never stop others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tessera.config.run_config import ParallelSection
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.task import Losses, LossTerm, Task
from tessera.parallel.apply import parallelize
from tessera.parallel.engine import SimpleEngine
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import Mesh
from tessera.training.run import train
from tessera_compat.mindspeed_mm.fsdp2 import (
    set_fullyshard_modules_to_wrap,
    set_modules_to_prefetch,
    set_recompute_modules_to_wrap,
)
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin, MultiModalModule
from tests.dist.layout_cases import MEMORY, MIXED
from tests.dist.layouts import LIMIT, Case, Record, good, measure_selected, params, recipe_of, relative
from tests.dist.spawn import RankError, run_ranks
from tests.quick import quick
from tests.toys.chat_set import write_chat_set

ROWS = [*MEMORY, *MIXED]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", params(ROWS))
def test_a_layout_trains_like_one_process_and_holds_what_its_plan_says(case: Case, measured: Any) -> None:
    assert good(measured[case.name]), measured[case.name]


# ---------------------------------------------------------------------------------------------- idle encoders

ORDERS = ["text picture", "picture text", "text text", "picture picture", "text picture"]


def write_ordered_set(folder: Path) -> Path:
    """Rows in the given orders: one per sample, so that which rank gets a picture is known."""
    write_chat_set(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    kinds = {"text": [r for r in rows if len(r["messages"][0]["content"]) == 1]}
    kinds["picture"] = [r for r in rows if len(r["messages"][0]["content"]) > 1]
    ordered = [kinds[kind].pop(0) for order in ORDERS for kind in order.split()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
    return folder


class SeenPictures(Record):
    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[int] = []

    def on_step_end(self, trainer: Any, result: Any) -> None:
        super().on_step_end(trainer, result)
        self.pictures.append(sum(batch.counts.get("images", 0) for batch in result.microbatches))


def train_ordered(rank: int, world: int, data: Path, out: Path, overrides: dict[str, Any]) -> Any:
    record = SeenPictures()
    fixed = {"data.shuffle": False, "data.pack": False, "train.global_batch": 2, "train.steps": len(ORDERS)}
    train(recipe_of(data, out), {**fixed, **overrides}, callbacks=[record])
    gradients = {n: t.flatten().tolist() for n, t in record.tensors.items() if n.startswith("gradient.")}
    losses = [float(record.tensors[f"loss.{step + 1}"]) for step in range(len(ORDERS))]
    return record.pictures, losses, gradients


IDLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {
        "parallel.prefetch_forward": 2,
        "parallel.prefetch_backward": 2,
        "parallel.recompute": ["vision.blocks.{*}"],
    },
    "offload": {"parallel.offload": True, "parallel.activation_offload": ["vision.blocks.{*}"]},
}


def train_ordered_each(rank: int, world: int, names: list[str], data: Path, out: Path) -> dict[str, Any]:
    return {name: train_ordered(rank, world, data, out / name, IDLE[name]) for name in names}


@pytest.fixture(scope="module")
def ordered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[dict[str, Any]]]:
    """One process, and each of two ranks; only the forms that tests of the file ask for, whatever was deselected."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    folder = tmp_path_factory.mktemp("ordered")
    data = write_ordered_set(folder / "data")
    alone = train_ordered(0, 1, data, folder / "one", {})
    return alone, run_ranks(train_ordered_each, 2, [name for name in IDLE if name in wanted], data, folder / "two")


@pytest.mark.parametrize("name", quick(IDLE, "prefetch"))
def test_idle_encoders_never_hang_and_equal_one_process(name: str, ordered: Any) -> None:
    (_, expected, right), ranks = ordered
    (first, losses, gradients), (second, _, _) = (rank[name] for rank in ranks)
    batches = [" ".join("picture" if n else "text" for n in pair) for pair in zip(first, second, strict=True)]
    assert batches == ORDERS  # one rank had pictures while the other had none
    assert losses == pytest.approx(expected, rel=LIMIT)
    assert max(relative(torch.tensor(gradients[n]), torch.tensor(right[n])) for n in right) < LIMIT


# ---------------------------------------------------------------------------------------------- tied weights, own way


class Net(MultiModalModule, FSDP2Mixin):
    """Two names for one weight, a buffer, and sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__(config=None)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


class OwnWay(Net):
    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        set_recompute_modules_to_wrap(self, ["layers.0"])
        set_fullyshard_modules_to_wrap(self, ["layers.{1,2}"], **fsdp2_kwargs)
        set_modules_to_prefetch(1, 1)


class Forgetful(Net):
    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        fully_shard(self.layers[0], **fsdp2_kwargs)


class Copying(Task):
    """Says the next token is the same one."""

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": len(batch["tokens"])}

    def losses(self, outputs: torch.Tensor, batch: Batch) -> Losses:
        total = torch.nn.functional.cross_entropy(outputs, batch["tokens"], reduction="sum")
        return Losses([LossTerm("loss", total, "tokens")])


def train_net(rank: int, world: int, kind: type[Net], **section: Any) -> tuple[list[list[float]], list[str]]:
    with torch.device("meta"):
        net = kind()
    plan = make_plan(ParallelSection(**section), ModelPlan(("layers.{*}",), {}), net, world)
    device = torch.device("cpu")
    parallelize(net, plan, Mesh(plan.layout.axes, device), device)
    assert net.head.weight is net.embed.weight
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            full = torch.randn(parameter.shape)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            rows = full.chunk(world)
            if local.numel():
                local.copy_(rows[rank] if plan.layout.sharding.active else full)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine, losses = SimpleEngine(net, plan.layout.sharding.accumulate), []
    for step in range(3):
        tokens = ((torch.arange(8) * 5 + step) % 13).chunk(world)[rank]
        out = engine.step(Copying(), [Batch({"tokens": half}) for half in tokens.chunk(2)])
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(out.loss()), float(out.counts["tokens"])])
    groups = [name for name, part in net.named_modules() if isinstance(part, FSDPModule)]
    return losses, groups


@pytest.mark.parametrize(
    ("kind", "groups"),
    [(Net, ["", "layers.0", "layers.1", "layers.2"]), (OwnWay, ["", "layers.1", "layers.2"])],
)
def test_a_model_that_shards_itself_keeps_its_ties_and_trains_like_one_process(
    kind: type[Net], groups: list[str]
) -> None:
    expected, none = run_ranks(train_net, 1, kind)[0]
    ours, theirs = run_ranks(train_net, 2, kind)[0]
    assert none == []
    assert theirs == groups
    assert [value for row in ours for value in row] == pytest.approx([v for row in expected for v in row], rel=LIMIT)


def test_a_model_that_leaves_parameters_out_is_refused() -> None:
    with pytest.raises(RankError, match=r"Forgetful .*embed\.weight"):
        run_ranks(train_net, 2, Forgetful)
