"""`tessera.train` takes objects wherever a recipe could name an import path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tessera
from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTerm, Task
from tessera.errors import TesseraError
from tests.errors import raises
from tests.toys.callbacks import StopAt


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 32) -> None:
        chance = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 4, generator=chance)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self.x[number]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).squeeze(-1)


class Regression(Task):
    def counts(self, batch: Batch) -> dict[str, int]:
        return {"points": len(batch["x"])}

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        return Losses([LossTerm("error", (outputs - batch["x"].sum(1)).square().sum(), "points")])


def recipe(out: Path, steps: int = 12) -> dict[str, Any]:
    return {
        "name": "given",
        "out": str(out),
        "model": {"family": "module"},
        "data": {"workers": 0},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 4, "device": "cpu", "eval_rows": 8},
        "optim": {"lr": 0.1, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 4},
    }


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def losses(run: tessera.Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def test_model_data_task_and_optimizer_as_objects(tmp_path: Path) -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects: dict[str, Any] = {
        "model": model,
        "dataset": Points(),
        "eval_dataset": Points(8),
        "task": Regression(),
        "optimizer": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    }
    whole = tessera.train(recipe(tmp_path / "whole"), **objects)
    values = losses(whole)
    assert values[-1] < 0.5 * values[0]
    assert [row for row in whole.metrics if row["kind"] == "eval"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())  # what was given stays as it is
    stopped = tessera.train(recipe(tmp_path / "stopped"), callbacks=[StopAt(4)], **objects)
    resumed = tessera.resume(stopped.folder, **objects)
    assert losses(resumed) == values


def test_a_run_begins_with_the_weights_of_the_object(tmp_path: Path) -> None:
    model, points = net(), Points(8)
    with torch.no_grad():
        expected = float((model(points.x) - points.x.sum(1)).square().mean())
    run = tessera.train(recipe(tmp_path, steps=1), model=model, dataset=points, task=Regression())
    assert losses(run)[0] == pytest.approx(expected, rel=1e-6)


def test_a_resume_without_them_names_what_is_missing(tmp_path: Path) -> None:
    run = tessera.train(recipe(tmp_path, steps=2), model=net(), dataset=Points(), task=Regression())
    with raises("run.object-missing") as caught:
        tessera.resume(run.folder)
    assert "tessera.resume(folder, model=..., task=..., dataset=...)" in str(caught.value)


def test_a_loader_as_an_object(tmp_path: Path) -> None:
    loader = DataLoader(Points(), batch_size=4)
    rows = {"train.global_batch": 2, "train.micro_batch": 1}  # each batch of a loader is one row
    run = tessera.train(recipe(tmp_path, steps=2), rows, model=net(), dataset=loader, task=Regression())
    assert len(losses(run)) == 2


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda groups: groups, "recipe.optimizer-type"),
        (lambda groups: torch.optim.SGD(groups[0]["params"][:1], lr=0.1), "recipe.optimizer-groups"),
    ],
)
def test_what_is_no_optimizer_for_these_groups_is_refused(make: Any, error: str, tmp_path: Path) -> None:
    with raises(error):
        tessera.train(recipe(tmp_path, 1), model=net(), dataset=Points(), task=Regression(), optimizer=make)


@pytest.mark.parametrize(
    ("objects", "error"),
    [
        ({"model": 3}, "run.wrong-object-type"),
        ({"task": Regression}, "run.wrong-object-type"),
        ({"optimizer": "adam"}, "run.wrong-object-type"),
        ({"callbacks": [StopAt]}, "run.not-a-callback"),
    ],
)
def test_an_object_of_another_kind_is_refused_by_name(objects: dict[str, Any], error: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"model": Net(), "task": Regression(), "dataset": Points(), **objects}
    with raises(error):
        tessera.train(recipe(tmp_path), **parts)


def test_a_task_that_returns_a_tensor_is_told_what_to_return(tmp_path: Path) -> None:
    class Mean(Regression):
        def losses(self, outputs: Tensor, batch: Batch) -> Any:
            return outputs.mean()

    with raises("task.losses-type"):
        tessera.train(recipe(tmp_path), model=Net(), task=Mean(), dataset=Points())
    with raises("task.loss-not-tensor", "text"):
        LossTerm("text", (torch.ones(()), torch.ones(())), "labels")  # type: ignore[arg-type]


def test_a_module_of_the_users_own_is_had_back_with_its_trained_weights(tmp_path: Path) -> None:
    points, settings = Points(), {"checkpoint.export": True}
    model = net()
    run = tessera.train(recipe(tmp_path), settings, model=model, dataset=points, task=Regression())
    trained = run.model
    with torch.no_grad():
        error = float((trained(points.x) - points.x.sum(1)).square().mean())
    assert error < 0.5 * losses(run)[0]
    assert run.checkpoint is not None
    for folder in (run.folder, run.checkpoint, run.folder / "hf"):
        again = net()
        model, _ = tessera.load(folder, model=again)
        assert model.module is again
        assert all(torch.equal(p, dict(trained.named_parameters())[name]) for name, p in again.named_parameters())
        assert torch.equal(model(Batch({"x": points.x})), trained(points.x))
        with pytest.raises(TesseraError) as refused:
            tessera.load(folder)
        assert "tessera.load(folder, model=net)" in str(refused.value.fix)


def test_a_module_that_other_weights_belong_to_is_refused_as_it_is(tmp_path: Path) -> None:
    run = tessera.train(recipe(tmp_path, steps=1), model=net(), dataset=Points(), task=Regression())
    wider, smaller, other = net(), net(), net()
    wider.more = nn.Linear(2, 2)
    del smaller.inner
    other.inner = nn.Linear(4, 9)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for module, name in ((wider, "more.weight"), (smaller, "inner.weight"), (other, "inner.weight")):
        with pytest.raises(TesseraError, match=name):
            tessera.load(run.folder, model=module)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with raises("model.option-not-for-module"):
        tessera.load(run.folder, model=net(), device="cpu")
    for model in (nn.Linear, "net", net().to("meta")):
        with pytest.raises(TesseraError) as refused:
            tessera.load(run.folder, model=model)
        assert refused.value.where == "model"
