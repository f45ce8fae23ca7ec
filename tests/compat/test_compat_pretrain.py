"""`pretrain` with callbacks in Megatron's style: gradients, log lines, evaluation, checkpoints, and bad callbacks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tessera.parallel.engine import SimpleEngine
from tessera.runtime.files import read_metrics
from tessera_compat import state
from tessera_compat.megatron.timers import get_timers
from tessera_compat.mindspeed_mm import training
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.callback_recipe import callback_recipe
from tessera_compat.mindspeed_mm.forward_step import ForwardStepTask, MicroBatch, mean_reports
from tessera_compat.mindspeed_mm.training import pretrain
from tessera_compat.shards.files import LATEST
from tests.close import rounding
from tests.errors import raises
from tests.toys import pretrain_parts as toy

MODEL_TYPE = 1  # of Megatron's enum, by value: the function reads the name of an enum alone


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run without --save writes to the working folder."""
    monkeypatch.chdir(tmp_path)
    yield
    state.destroy()


def micro_batches(count: int = 3) -> list[dict[str, Any]]:
    """Return micro-batches of two samples each, with different numbers of elements under the mask."""
    points = toy.Points(2 * count)
    return [
        {"x": points.x[i : i + 2].double(), "loss_mask": points.mask[i : i + 2].double()}
        for i in range(0, 2 * count, 2)
    ]


def plain(forward_step: Any) -> Any:
    """Return the callback without `get_args`, for a task that runs alone."""
    loss = {"mean": toy.mean_loss, "sum": toy.sum_loss}[forward_step]

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        return model(batch["x"]), partial(loss, batch["loss_mask"])

    return step


@pytest.mark.parametrize(
    ("form", "per_token", "cp"),
    [("mean", False, 1), ("mean", False, 2), ("sum", False, 1), ("sum", True, 1), ("sum", True, 2)],
)
def test_gradients_follow_the_formula_of_megatron(form: str, per_token: bool, cp: int) -> None:
    """In float64. Megatron: loss x cp / micro-batches, averaged over dp x cp ranks; per token: sums over tokens."""
    net = toy.model_provider().double()
    batches = micro_batches()
    task = ForwardStepTask(plain(form), per_token=per_token, cp=cp)
    totals = SimpleEngine(net).step(task, [MicroBatch.of(batch) for batch in batches])
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    masks = [batch["loss_mask"] for batch in batches]
    sums = [(net(batch["x"]) * mask).sum() for batch, mask in zip(batches, masks, strict=True)]
    if per_token:
        expected = cp * sum(sums) / sum(mask.sum() for mask in masks)
    else:
        expected = cp * sum(total / mask.sum() for total, mask in zip(sums, masks, strict=True)) / len(sums)
    expected.backward()
    assert float(totals.loss()) == pytest.approx(float(expected.detach()), rel=rounding(64, torch.float64))
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        limit = rounding(64, torch.float64) * float(parameter.grad.abs().max())
        assert float((gradients[name] - parameter.grad).abs().max()) <= limit, name


def test_reports_are_averaged_as_megatron_does() -> None:
    def number(value: float) -> torch.Tensor:
        return torch.tensor(value)

    reports = [
        {"plain": (number(1.0), number(1.0)), "pair": (number(2.0), number(1.0))},
        {"plain": (number(4.0), number(1.0)), "pair": (number(4.0), number(5.0))},
    ]
    assert {name: float(value) for name, value in mean_reports(reports).items()} == {"plain": 2.5, "pair": 1.0}


def run(
    save: Path | None, *more: str, provider: Any = toy.datasets_provider, step: Any = toy.forward_step, **kw: Any
) -> None:
    with toy.command_line(*toy.flags(save, *more, **kw)):
        pretrain(provider, toy.model_provider, MODEL_TYPE, step, args_defaults={"dataloader_type": "external"})


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


def test_a_job_trains_logs_evaluates_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "ckpt"
    save.mkdir()
    (save / "iter_0000001").symlink_to("checkpoints/step-00000001")
    run(save)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "elapsed time per iteration" in line]
    assert len(lines) == 4
    pattern = (
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +1/ +4 \| consumed samples: +8 \| "
        r"elapsed time per iteration \(ms\): [\d.]+ \| learning rate: 1\.000000E-02 \| global batch size: +8 \| "
        r"lm loss: [\d.]+E[+-]\d\d \| loss scale: 1\.0 \| grad norm: [\d.]+ \| "
        r"number of skipped iterations: +0 \| number of nan iterations: +0 \|"
    )
    assert re.fullmatch(pattern, lines[0]), lines[0]
    means = losses(save)
    assert means[-1] < means[0]
    for line, mean in zip(lines, means, strict=True):
        assert float(line.split("lm loss: ")[1].split(" ")[0]) == pytest.approx(mean, rel=1e-6)
    assert " validation loss at iteration 2 | lm loss value: " in out
    assert " validation loss at iteration 4 on validation set | lm loss value: " in out
    assert " validation loss at iteration 4 on test set | lm loss value: " in out
    evaluations = [row for row in read_metrics(save / "metrics.jsonl") if row["kind"] == "eval"]
    assert [sorted(row)[0] for row in evaluations] == ["eval_lm loss", "eval_lm loss", "kind"]
    assert f"saving checkpoint at iteration       4 to {save}" in out
    assert (save / LATEST).read_text() == "4"
    assert (save / "iter_0000004").samefile(save / "checkpoints" / "step-00000004")
    assert not (save / "iter_0000001").is_symlink()  # its checkpoint is gone


def test_throughput_by_awk_comes_out_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two ways in which launch scripts read the time of an iteration from the log."""
    run(None, step=toy.forward_step_sum)
    log = tmp_path / "train.log"
    log.write_text(capsys.readouterr().out)
    times = [float(time) for time in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log.read_text())]
    mean = "awk '{sum+=$1} END {if (NR != 0) printf(\"%.3f\", sum/NR)}'"
    fifth_field = (
        f"grep 'elapsed time per iteration' {log} | awk -F ':' '{{print $5}}' | awk -F '|' '{{print $1}}' | {mean}"
    )
    by_name = f"grep -o 'elapsed time per iteration (ms): [0-9.]*' {log} | awk -F ': ' '{{print $2}}' | {mean}"
    for command in (fifth_field, by_name):
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert float(said) == pytest.approx(sum(times) / len(times), abs=1e-3)


def test_resume_is_bitwise(tmp_path: Path) -> None:
    run(tmp_path / "whole", iterations=6)
    run(tmp_path / "parts", "--load", str(tmp_path / "parts"), iterations=4)
    run(tmp_path / "parts", "--load", str(tmp_path / "parts"), iterations=6)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    with raises("job.save-folder-used"):
        run(tmp_path / "parts", iterations=6)


@pytest.mark.slow
def test_load_of_another_run_gives_its_weights(tmp_path: Path) -> None:
    run(tmp_path / "first", iterations=4)
    run(tmp_path / "second", "--load", str(tmp_path / "first"), "--finetune", iterations=2)
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0]


def test_loaders_iterators_and_data_sets_give_the_same_batches(tmp_path: Path) -> None:
    def iterators(counts: list[int]) -> tuple[Any, Any, Any]:
        return iter(DataLoader(toy.Points(), batch_size=2)), None, None

    run(tmp_path / "sets", iterations=3)
    run(tmp_path / "loaders", provider=toy.loaders_provider, iterations=3)
    run(tmp_path / "iterators", provider=iterators, iterations=3)
    assert losses(tmp_path / "sets") == losses(tmp_path / "loaders") == losses(tmp_path / "iterators")
    with raises("job.data-ended", "16"):
        run(tmp_path / "more", provider=iterators, iterations=5)


@pytest.mark.slow
def test_non_loss_data_reaches_its_function(tmp_path: Path) -> None:
    def loss_func(errors: torch.Tensor, non_loss_data: bool = False) -> Any:
        return errors.detach() if non_loss_data else (errors.mean(), {"loss": errors.mean().detach()})

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        return model(next(data_iterator)["x"]), loss_func

    calls: list[tuple[list[Any], int]] = []
    with toy.command_line(*toy.flags(None)):
        pretrain(
            toy.datasets_provider,
            toy.model_provider,
            MODEL_TYPE,
            step,
            process_non_loss_data_func=lambda data, iteration, writer: calls.append((data, iteration)),
        )
    assert [(len(data), iteration) for data, iteration in calls] == [(4, 2), (4, 4), (4, 4)]


def test_the_flow_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The functions that `pretrain` stands for, called one by one, train as it does."""
    run(tmp_path / "whole", iterations=3)
    with toy.command_line(*toy.flags(tmp_path / "steps", iterations=3)):
        training.initialize_megatron(args_defaults={"dataloader_type": "external"})
        try:
            model, optimizer, scheduler = training.setup_model_and_optimizer(toy.model_provider, MODEL_TYPE)
            train_data, valid_data, _ = training.build_train_valid_test_data_iterators(toy.datasets_provider)
            for iteration in range(3):
                assert scheduler.num_steps == iteration
                step_losses, skipped, *_ = training.train_step(
                    toy.forward_step, train_data, model, optimizer, scheduler
                )
                assert not skipped
                assert list(step_losses) == ["lm loss"]
            capsys.readouterr()
            training.evaluate_and_print_results("the end", toy.forward_step, valid_data, model, 3)
            assert " validation loss at the end | lm loss value: " in capsys.readouterr().out
            training.save_checkpoint(3, model, optimizer, scheduler)
            assert (tmp_path / "steps" / LATEST).read_text() == "3"
            assert training.load_checkpoint(model, optimizer, scheduler) == (3, 0)
            training.current_session().trainer.end()
        finally:
            training.current_session().abandon()
    assert losses(tmp_path / "steps") == losses(tmp_path / "whole")


def returning(value: Any) -> Any:
    def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
        output = model(next(data_iterator)["x"])
        return value(output) if callable(value) else value

    return forward_step


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (returning(None), "job.forward-step-result forward_step"),
        (returning(lambda out: out), "job.forward-step-result forward_step"),
        (returning(lambda out: (out, lambda o: None)), "job.loss-result"),
        (returning(lambda out: (out, lambda o: (o, {}))), "job.loss-result"),
        (returning(lambda out: (out, lambda o: (o.mean(), 3))), "job.loss-result"),
        (returning(lambda out: (out, lambda o: (o.mean(), {"a": "b"}))), "job.loss-result"),
        (returning(lambda out: (out, lambda o: (o.mean().detach(), {}))), "job.loss-without-gradient"),
        (returning(lambda out: (out, lambda o: (o.sum(), "9", {}))), "job.loss-result"),
    ],
)
def test_a_callback_that_returns_the_wrong_thing_is_named(step: Any, error: str) -> None:
    batch = MicroBatch.of({"x": toy.Points(2).x})
    with raises(error):
        SimpleEngine(toy.model_provider()).step(ForwardStepTask(step), [batch])


def test_what_a_job_gives_is_checked_at_the_first_call(tmp_path: Path) -> None:
    """One run, which goes as far as each mistake: the callback is named, and nothing is trained."""
    wrong: list[tuple[Any, str]] = [
        (lambda counts: toy.Points(), "job.provided-data"),
        (lambda counts: (toy.Points(), None), "job.provided-data"),
        (lambda counts: (3, None, None), "job.provided-data"),
        (lambda first, second: None, "job.callback-parameters"),
    ]
    with toy.command_line(*toy.flags(None, "--calculate-per-token-loss")):
        training.initialize_megatron()
        try:
            with raises("job.model-not-set-up"):
                training.get_optimizer_param_scheduler(None)  # type: ignore[arg-type]
            with raises("job.provided-model", "model_provider"):
                training.setup_model_and_optimizer(lambda pre_process, post_process: 3, MODEL_TYPE)
            model, optimizer, scheduler = training.setup_model_and_optimizer(toy.model_provider, MODEL_TYPE)
            for provider, message in wrong:
                with raises(message) as caught:
                    training.build_train_valid_test_data_loaders(provider)
                assert "train_valid_test_datasets_provider" in str(caught.value)
            data = iter(DataLoader(toy.Points(), batch_size=2))
            with raises("job.token-count-missing", "mean_loss"):
                training.train_step(toy.forward_step, data, model, optimizer, scheduler)
            with raises("job.foreign-model"):
                training.train_step(toy.forward_step, data, [toy.model_provider()], optimizer, scheduler)
            with raises("job.run-twice"):
                training.initialize_megatron()
        finally:
            training.current_session().abandon()
    assert signal.set_wakeup_fd(-1) == -1, "what the steps opened is closed with the run"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tensor-model-parallel-size", "2"], "job.provided-model-parallel parallel.tp=2"),
        (["--lr-decay-iters", "9"], "job.decay-steps --lr-decay-iters"),
        (["--min-lr", "0.001"], None),
        (["--expert-model-parallel-size", "2"], "job.provided-model-parallel"),
    ],
)
def test_flags_that_the_callbacks_do_not_fit(
    more: list[str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2" if "tensor" in more[0] else "1")
    args = parse_args([*toy.flags(None), *more])
    if message is None:
        assert callback_recipe(args)["optim"]["schedule"] == {"kind": "constant", "warmup": 0}
        return
    with raises(message):
        callback_recipe(args)


def test_patches_of_model_json_are_checked(tmp_path: Path) -> None:
    """Nothing is patched: what changes no result passes, what would change one is refused."""
    for patches, message in (({"clip_grad_async": True}, None), ({"use_fsdp1": {}}, "job.model-patches use_fsdp1")):
        model = tmp_path / "model.json"
        model.write_text(json.dumps({"patch": patches}))
        state.set_args(parse_args([*toy.flags(None), "--mm-model", str(model)]))
        if message is None:
            training.PatchesManager.apply_patches_from_config()
            continue
        with raises(message):
            training.PatchesManager.apply_patches_from_config()


def test_adapters_and_groups_by_flags(tmp_path: Path) -> None:
    """Names are the last parts of paths in the user's model; with adapters everything else stays as it is."""
    more = "--lora-target-modules inner --lora-r 2 --lora-alpha 4 --lr-scale-modules lora_a --lr-mult 2"
    with raises("job.unknown-module", "lora_a"):
        run(None, *more.split(), iterations=1)
    state.destroy()
    with toy.command_line(*toy.flags(None, "--lora-target-modules", "inner", "--lora-r", "2", "--lora-alpha", "4")):
        training.initialize_megatron()
    try:
        model, optimizer, _ = training.setup_model_and_optimizer(toy.model_provider, MODEL_TYPE)
        trained = [name for name, parameter in model[0].named_parameters() if parameter.requires_grad]
        assert len(trained) == 2
        assert all(name.startswith("inner.") for name in trained)
    finally:
        training.current_session().abandon()
    state.destroy()
    with toy.command_line(*toy.flags(None, "--lr-scale-modules", "outer", "--lr-mult", "2")):
        training.initialize_megatron()
    try:
        no_decay = lambda name, parameter: name.endswith("bias")  # noqa: E731
        _, optimizer, _ = training.setup_model_and_optimizer(toy.model_provider, MODEL_TYPE, no_decay)
        rates = {(group["base_lr"], group["weight_decay"]): len(group["params"]) for group in optimizer.param_groups}
        assert rates == {(0.01, 0.01): 1, (0.01, 0.0): 1, (0.02, 0.01): 1, (0.02, 0.0): 1}
    finally:
        training.current_session().abandon()


def test_timers_of_a_forward_step(capsys: pytest.CaptureFixture[str]) -> None:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    assert timers("batch-generator").elapsed(reset=False) > 0
    timers("batch-generator").stop()
    with raises("megatron.timer-state"):
        timers("batch-generator").stop()
    timers.log(["batch-generator", "unknown"])
    assert re.fullmatch(r"time \(ms\) \| batch-generator: [\d.]+\n", capsys.readouterr().out)
    assert timers("batch-generator").elapsed() == 0.0


def test_a_run_goes_on_with_the_flags_of_its_new_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples are counted, not micro-batches: another size of either goes on where the run stopped."""
    seen: list[str] = []

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        seen.extend(batch["name"])
        return model(batch["x"]), toy.bare_loss

    def names(lr: str = "0.01", seed: str = "3", **kw: Any) -> list[str]:
        seen.clear()
        words = " ".join(toy.flags(tmp_path / "s", "--load", str(tmp_path / "s"), **kw))
        words = words.replace("--eval-iters 1", "--eval-iters 0").replace(
            "--lr 0.01 --seed 3", f"--lr {lr} --seed {seed}"
        )
        with toy.command_line(*words.split()):
            pretrain(toy.datasets_provider, toy.model_provider, MODEL_TYPE, step)
        return [name.removeprefix("sample-") for name in seen]

    assert names(iterations=2, batch=4) == [str(number) for number in range(8)]
    capsys.readouterr()
    assert names("0.5", iterations=3, batch=8, micro=4) == [str(number) for number in range(8, 16)]
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("changed since"))
    for change in (
        "--lr: 0.01 -> 0.5",
        "--train-iters: 2 -> 3",
        "--global-batch-size: 4 -> 8",
        "--micro-batch-size: 2 -> 4",
    ):
        assert change in line
    assert "iteration        3/       3 | consumed samples:           16 |" in out
    assert "learning rate: 5.000000E-01 | global batch size:     8" in out
    with raises("job.fixed-setting", "--seed"):
        names(seed="4", iterations=4)
    with raises("job.micro-batch-changed", "16"):
        names(iterations=4, batch=9, micro=3)
