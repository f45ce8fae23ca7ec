"""Run a user's `forward_step` as a task, with the loss rules of Megatron 0.12.1.

    forward_step(data_iterator, model) -> (output, loss_func)
    loss_func(output) -> (loss, report)              a mean over one micro-batch
                      -> (loss, tokens, report)      a sum over so many tokens
                      -> loss                        without a report

Megatron multiplies each loss by the context-parallel size, divides it by the micro-batches of a step and averages
gradients over data- and context-parallel ranks. So the gradient is that of

    context_parallel / (micro-batches of all ranks) * sum over all micro-batches of loss, or of loss / tokens,

and with `--calculate-per-token-loss` that of context_parallel * (sum of losses) / (sum of tokens). Both are a sum
divided by a count, as tasks of Tessera return their loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTerm, Task
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state

MICRO_BATCHES, TOKENS = "micro_batches", "tokens"
ForwardStep = Callable[[Iterator[Any], nn.Module], Any]
Report = dict[str, tuple[Tensor, Tensor]]  # name -> (numerator, denominator), detached


@dataclass
class MicroBatch(Batch):
    """Store an item of the user's data iterator for a micro-batch.

    The item is in the list `box`: `release` empties it, which frees the memory even if this micro-batch is still
    referenced.
    """

    box: list[Any] = field(default_factory=list)

    @staticmethod
    def of(value: Any, row: int = 0, samples: int = 1) -> MicroBatch:
        """Return a micro-batch that holds an item of the user's data iterator."""
        return MicroBatch({}, rows=((row, 0),), counts={"samples": samples}, box=[value])

    def release(self) -> None:
        """Free the memory of the item."""
        self.box.clear()


class OneMicroBatch(Iterator[Any]):
    """Serve as the data iterator of a single call of `forward_step`: yield the micro-batch of this call once."""

    def __init__(self, batch: MicroBatch, owner: str) -> None:
        self._values, self._owner = iter(list(batch.box)), owner

    def __next__(self) -> Any:
        for value in self._values:
            return value
        raise TesseraError(
            f"{self._owner} requested a second batch from its data iterator",
            where=self._owner,
            fix="request a single batch in each call: forward_step is called for every micro-batch",
            code="job.second-batch",
        )


class ForwardResult(NamedTuple):
    """Store the validated result of `forward_step`."""

    output: Any
    loss_func: Callable[..., Any]


class ForwardStepTask(Task):
    """Run the user's `forward_step`, and store the reports of the latest micro-batches."""

    def __init__(self, forward_step: ForwardStep | None = None, *, per_token: bool = False, cp: int = 1) -> None:
        self.forward_step = forward_step
        self.per_token, self.cp = per_token, cp
        self.reports: list[Report] = []
        self.collected: list[Any] | None = (
            None  # results of `loss_func(output, non_loss_data=True)` during an evaluation
        )

    def counts(self, batch: Batch) -> dict[str, int] | None:
        """Return a count of one micro-batch, because losses are averaged over micro-batches.

        With `per_token` return None: then loss_func returns the number of tokens.
        """
        return None if self.per_token else {MICRO_BATCHES: 1}

    def forward(self, model: nn.Module, batch: Batch) -> ForwardResult:
        assert self.forward_step is not None, "train, train_step or pretrain gives the function first"
        assert isinstance(batch, MicroBatch)
        name = callback_name(self.forward_step)
        result = self.forward_step(OneMicroBatch(batch, name), model)
        if not isinstance(result, (tuple, list)) or len(result) != 2 or not callable(result[1]):
            raise TesseraError(
                f"{name} returned {described(result)}",
                where=name,
                allowed=["(output, loss_func)"],
                fix="return the output of the model and a function that computes the loss",
                code="job.forward-step-result",
            )
        return ForwardResult(*result)

    def losses(self, outputs: ForwardResult, batch: Batch) -> Losses:
        name = callback_name(outputs.loss_func)
        if self.collected is not None:
            self.collected.append(outputs.loss_func(outputs.output, non_loss_data=True))
        loss, tokens, report = self._checked(outputs.loss_func(outputs.output), name)
        self.reports.append(report)
        if self.per_token:
            return Losses([LossTerm("loss", loss, TOKENS, float(self.cp))], counts={TOKENS: tokens})
        mean = (
            loss if tokens is None else loss / tokens.clamp(min=1)
        )  # Megatron 0.12.1 divides by zero for a batch without tokens
        return Losses([LossTerm("loss", mean, MICRO_BATCHES, float(self.cp))])

    def _checked(self, returned: Any, name: str) -> tuple[Tensor, Any, Report]:
        """Validate the result of a loss function. Return the loss, the number of tokens or None, and the report."""
        if isinstance(returned, Tensor):
            returned = (returned, {})
        if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
            raise self._wrong(name, described(returned))
        loss, tokens, report = returned[0], returned[1] if len(returned) == 3 else None, returned[-1]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._wrong(name, f"{described(loss)} as the loss")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TesseraError(
                f"{name} returned a loss without gradient",
                where=name,
                fix="compute it from the output of the model, and return it without detach() or item()",
                code="job.loss-without-gradient",
            )
        if not isinstance(report, Mapping):
            raise self._wrong(name, f"{described(report)} as the report")
        if len(returned) == 3:
            if not _is_scalar(tokens):
                raise self._wrong(name, f"{described(tokens)} as the number of tokens")
            tokens = torch.as_tensor(tokens, device=loss.device).detach().reshape(())
        elif self.per_token:
            raise TesseraError(
                f"{name} returned no number of tokens, and --calculate-per-token-loss divides by it",
                where=name,
                allowed=["(sum of losses, number of tokens, report)"],
                fix="return three values, or remove the flag",
                code="job.token-count-missing",
            )
        return loss.reshape(()), tokens, {str(key): self._ratio(name, str(key), value) for key, value in report.items()}

    def _ratio(self, name: str, key: str, value: Any) -> tuple[Tensor, Tensor]:
        pair = value if isinstance(value, (tuple, list)) else (value, 1)
        if len(pair) != 2 or not all(_is_scalar(number) for number in pair):
            raise self._wrong(name, f"{described(value)} as {key!r} of the report")
        numerator, denominator = (torch.as_tensor(number).detach().clone().reshape(()) for number in pair)
        return numerator, denominator.to(numerator.device)

    def _wrong(self, name: str, what: str) -> TesseraError:
        return TesseraError(
            f"{name} returned {what}",
            where=name,
            allowed=["(loss, report)", "(sum of losses, number of tokens, report)", "loss"],
            fix="the loss is a tensor with one element, the report a dict of numbers or pairs (sum, count)",
            code="job.loss-result",
        )


def mean_reports(reports: Sequence[Report]) -> dict[str, Tensor]:
    """Average reports over micro-batches as Megatron does.

    For pairs (sum, count), the summed values are divided by the summed counts. Plain numbers are averaged. The names
    are those of the first micro-batch.
    """
    if not reports:
        return {}
    means: dict[str, Tensor] = {}
    for name in reports[0]:
        fractions = [report[name] for report in reports if name in report]
        wide = devices.sum_dtype(fractions[0][0].device)
        total = torch.stack([numerator.to(wide) for numerator, _ in fractions]).sum()
        means[name] = total / torch.stack([denominator.to(wide) for _, denominator in fractions]).sum()
    return means


def compute_token_level_loss(outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the number of tokens, as three tensors.

    The first is [sum of losses / context-parallel size, tokens] of this rank, the second its number of tokens, and the
    third [sum of losses, tokens] summed over the data-parallel ranks.

    `outputs["loss"]`: the losses of tokens or their sum. `outputs["loss_mask"]`: which tokens count; with context
    parallelism `outputs["token_nums"]` instead, the number of tokens of the full sequence.
    """
    cp = parallel_state.get_context_parallel_world_size()
    losses = outputs["loss"].float()
    if cp > 1:
        total, tokens = losses.sum(), outputs["token_nums"].sum()
    else:
        mask = outputs["loss_mask"].reshape(-1).float()
        total = (losses.reshape(-1) * mask).sum() if losses.numel() == mask.numel() else losses.sum()
        tokens = mask.sum()
    both = torch.stack([total, tokens.to(total)])
    reported = both.detach().clone()
    dist.all_reduce(reported, group=parallel_state.get_data_parallel_group())
    return both / both.new_tensor([cp, 1]), tokens.detach().to(torch.int64), reported


def callback_name(function: Any) -> str:
    """Return the name of a user's function, `partial` or callable object, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(function.__qualname__) if hasattr(function, "__qualname__") else type(function).__name__


def described(value: Any) -> str:
    """Describe the return value of a user's function, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(one).__name__ for one in value[:4])}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
