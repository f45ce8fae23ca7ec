"""Loss terms with counts of their own: every split of a global batch gives the gradient of the whole, and gradients are
those of the loss when backward has ended."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.core.batch import IGNORE, Batch
from tessera.core.callback import AsyncScalars, Callback
from tessera.core.outputs import LOGITS, Projection
from tessera.core.task import Counts, Losses, LossTerm, LossTotals, Metric, SumSpec, Task
from tessera.parallel.engine import SimpleEngine
from tests.close import assert_as_close
from tests.errors import raises

ROWS, LENGTH, WORDS = 6, 7, 11


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.inner = nn.Linear(16, 16)
        self.words = nn.Linear(16, WORDS)
        self.value = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.inner(self.embed(batch["tokens"])))
        return self.words(hidden), self.value(hidden).squeeze(-1)


class WordsAndValues(Task):
    """A text loss over labels, a regression over values that only some rows have, and a metric."""

    def counts(self, batch: Batch) -> Counts:
        return {"labels": (batch["labels"] >= 0).sum(), "values": int(batch.counts["values"])}

    def losses(self, outputs: tuple[Tensor, Tensor], batch: Batch) -> Losses:
        logits, values = outputs
        words = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1, reduction="sum"
        )
        error = ((values - batch["values"]).square() * batch["has_value"]).sum()
        right = (logits.argmax(-1) == batch["labels"]).sum()
        return Losses(
            [LossTerm("words", words, "labels"), LossTerm("values", error, "values", weight=0.3)],
            {"accuracy": Metric(right, "labels")},
        )


class OneCountMissing(WordsAndValues):
    def counts(self, batch: Batch) -> Counts:
        return {"labels": 1}


class CountsAfterForward(WordsAndValues):
    def counts(self, batch: Batch) -> Counts | None:
        return None

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        result = super().losses(outputs, batch)
        return Losses(result.terms[:1], counts={"labels": (batch["labels"] >= 0).sum()})


def rows(numbers: range, dtype: torch.dtype) -> Batch:
    columns: dict[str, list[Tensor]] = {"tokens": [], "labels": [], "values": [], "has_value": []}
    for number in numbers:
        chance = torch.Generator().manual_seed(number)
        labels = torch.randint(0, WORDS, (LENGTH,), generator=chance)
        labels[: number + 1] = -1  # rows weigh differently in one count ...
        columns["tokens"].append(torch.randint(0, WORDS, (LENGTH,), generator=chance))
        columns["labels"].append(labels)
        columns["values"].append(torch.randn(LENGTH, generator=chance, dtype=torch.float64).to(dtype))
        columns["has_value"].append((torch.arange(LENGTH) < 2 * (number % 3)).to(dtype))  # ... than in the other
    tensors = {name: torch.stack(parts) for name, parts in columns.items()}
    return Batch(tensors, counts={"values": int(tensors["has_value"].sum())})


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def exact() -> tuple[float, dict[str, Tensor]]:
    """The formula in float64 over the whole batch at once, without an engine."""
    module, batch = net(torch.float64), rows(range(ROWS), torch.float64)
    logits, values = module(batch)
    labels = batch["labels"].flatten()
    words = nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1)
    error = ((values - batch["values"]).square() * batch["has_value"]).sum() / batch["has_value"].sum()
    loss = words + 0.3 * error
    loss.backward()
    return float(loss.detach()), gradients(module)


def splits() -> Iterator[tuple[range, ...]]:
    """Every way to cut the rows into micro-batches."""
    for size in range(ROWS):
        for cuts in itertools.combinations(range(1, ROWS), size):
            yield tuple(range(a, b) for a, b in itertools.pairwise((0, *cuts, ROWS)))


def test_every_split_gives_the_gradient_of_the_float64_formula() -> None:
    loss, expected = exact()
    peer = net(torch.float32)
    SimpleEngine(peer).step(WordsAndValues(), [rows(range(ROWS), torch.float32)])
    count = 0
    for split in splits():
        module = net(torch.float32)
        totals = SimpleEngine(module).step(WordsAndValues(), [rows(part, torch.float32) for part in split])
        assert float(totals.loss()) == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients(module).items():
            assert_as_close(gradient, gradients(peer)[name], expected[name], roundings=4.0, what=f"{split} {name}")
        count += 1
    assert count == 2 ** (ROWS - 1)


def test_terms_and_metrics_are_reported_by_name() -> None:
    totals = SimpleEngine(net(torch.float32)).step(WordsAndValues(), [rows(range(ROWS), torch.float32)])
    metrics = totals.metrics()
    assert metrics.keys() == {"words", "values", "accuracy"}
    assert float(totals.loss()) == pytest.approx(float(metrics["words"] + 0.3 * metrics["values"]))


def test_evaluation_adds_up_like_training() -> None:
    engine, task = SimpleEngine(net(torch.float32)), WordsAndValues()
    whole = engine.evaluate(task, rows(range(ROWS), torch.float32), counts=True)
    parts = [engine.evaluate(task, rows(range(at, at + 2), torch.float32), counts=True) for at in range(0, ROWS, 2)]
    nothing = engine.evaluate(task, rows(range(2), torch.float32), counts=False)
    total = parts[0] + parts[1] + parts[2] + nothing
    assert float(total.loss()) == pytest.approx(float(whole.loss()), rel=1e-6)
    assert float(total.counts["labels"]) == float(whole.counts["labels"])


def test_a_count_known_after_forward_gives_final_gradients_too() -> None:
    module, batch = net(torch.float32), rows(range(ROWS), torch.float32)
    nn.functional.cross_entropy(module(batch)[0].flatten(0, 1), batch["labels"].flatten(), ignore_index=-1).backward()
    expected = gradients(module)
    module.zero_grad()
    engine = SimpleEngine(module)
    engine.step(CountsAfterForward(), [rows(range(2), torch.float32), rows(range(2, ROWS), torch.float32)])
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_a_term_without_its_count_is_named() -> None:
    with raises("task.unknown-count") as caught:
        SimpleEngine(net(torch.float32)).step(OneCountMissing(), [rows(range(2), torch.float32)])
    assert caught.value.allowed == ["labels"]


def test_a_task_cannot_be_written_without_counts_and_losses() -> None:
    class Half(Task):
        def losses(self, outputs: Any, batch: Batch) -> Losses:
            raise AssertionError

    with pytest.raises(TypeError, match="counts"):
        Half()  # type: ignore[abstract]


class SeeGradients(Callback):
    """Compares the gradient that a callback sees with the change that plain gradient descent makes."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optim(self, trainer: Any) -> None:
        squares = [p.grad.double().square().sum() for p in trainer.module.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


def test_a_callback_sees_the_gradients_of_the_loss(tmp_path: Path) -> None:
    seen = SeeGradients()
    recipe = {
        "name": "seen",
        "out": str(tmp_path),
        "model": {"family": "tests.toys.denoiser", "preset": "tiny"},
        "data": {"kind": "tests.toys.digit_pictures"},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
        "optim": {"clip_norm": 1e-3},  # clipping comes later, and leaves no trace in what is seen
    }
    run = tessera.train(recipe, callbacks=[seen])
    reported = [row["grad_norm"] for row in run.metrics if row["kind"] == "train"]
    assert seen.norms == pytest.approx(reported, rel=1e-5)
    assert min(reported) > 1e-2


def test_the_page_s_example_is_the_formula() -> None:
    """`docs/how-to/write-an-objective.md`."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-an-objective.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    defined: dict[str, Any] = {}
    exec(code, defined)
    module, batch = net(torch.float32), rows(range(ROWS), torch.float32)
    named = batch.with_tensors(value=batch["values"])
    totals = SimpleEngine(module).step(defined["TASK"](), [named])
    assert float(totals.loss()) == pytest.approx(exact()[0], rel=1e-5)


def test_the_page_s_example_for_language_models_smooths_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-an-objective.md").read_text(encoding="utf-8")
    defined: dict[str, Any] = {}
    exec(page.split("```python\n")[3].split("```")[0], defined)
    labels, head = torch.tensor([3, IGNORE, 1, IGNORE]), nn.Linear(8, WORDS)
    hidden = torch.randn(4, 8)
    batch = Batch({"labels": labels})
    task = defined["TASK"](smoothing=0.2)
    (term,) = task.losses({LOGITS: Projection(hidden, head)}, batch).terms
    expected = nn.functional.cross_entropy(head(hidden), labels, label_smoothing=0.2)
    mean = (term.sum / task.counts(batch)[term.count]).item()
    assert mean == pytest.approx(expected.item(), rel=1e-5)


def test_a_metric_of_nothing_is_left_out() -> None:
    specs = (SumSpec("text", "labels", 1.0), SumSpec("error_at_low_noise", "low"), SumSpec("broken", "labels"))
    counts = {"labels": torch.tensor(4), "low": torch.tensor(0)}
    totals = LossTotals(specs, torch.tensor([2.0, 0.0, float("nan")]), counts)
    scalars = AsyncScalars.of({"loss": totals.loss(), **totals.metrics()}, totals.counted())()
    assert scalars["loss"] == 0.5
    assert math.isnan(scalars["broken"]), "what is no number is shown, where something was counted"
    assert "error_at_low_noise" not in scalars
