"""Run the forward and backward passes of one global batch: without pipelining, as 1F1B, or interleaved.

A schedule is the order in which a rank runs forward and backward passes of micro-batches through its model chunks; one
loop runs any order. Losses are scaled as in release 0.12.1 (`forward_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import ModelParallelConfig
from tessera_compat.megatron.messages import Messages, get_tensor_shape
from tessera_compat.megatron.module import get_attr_wrapped_model, get_model_config

Pass = tuple[Literal["forward", "backward"], int, int]  # kind, micro-batch, model chunk
_WHERE = "forward_backward_func"


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Return the pipeline schedule for the sizes that `initialize_model_parallel` set."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return forward_backward_no_pipelining
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


# ------------------------------------------------------------------------------------------------------- one pass


def forward_step(
    forward_step_func: Callable[..., tuple[Any, Callable[..., Any]]],
    data_iterator: Iterator[Any] | None,
    model: nn.Module,
    num_microbatches: int,
    input_tensor: Tensor | None,
    forward_data_store: list[Any],
    config: ModelParallelConfig,
    collect_non_loss_data: bool = False,
    is_last_stage: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the user's forward function. Return its output (on the last stage the loss) and the number of tokens.

    If the loss function returns (loss, report), the loss is a mean over the micro-batch. It is multiplied by the
    context-parallel size and divided by the number of micro-batches. If it returns (loss, tokens, report), the loss is
    a sum. It is also divided by the number of tokens, unless `calculate_per_token_loss` is set: then
    `finalize_model_grads_func` divides the gradients. The division is in place, so a report that contains the same
    tensor shows the divided loss.
    """
    get_attr_wrapped_model(model, "set_input_tensor")([input_tensor])
    device = devices.current().type
    autocast = torch.autocast(device, dtype=config.autocast_dtype) if config.enable_autocast else nullcontext()
    with autocast:
        returned = forward_step_func(data_iterator, model)
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        raise TesseraError(
            "forward_step_func must return (output, loss_func)",
            where=_WHERE,
            fix="return output, partial(loss_func, mask)",
            code="megatron.forward-step-result",
        )
    output, loss_func = returned
    tokens = torch.zeros((), dtype=torch.int, device=device)
    if not is_last_stage:
        return output, tokens
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output, non_loss_data=True))
        return output, tokens
    results = loss_func(output)
    if not isinstance(results, tuple) or len(results) not in (2, 3) or not isinstance(results[0], Tensor):
        raise TesseraError(
            "loss_func must return (loss, report) or (loss, tokens, report)",
            where=_WHERE,
            fix="return a tensor with one element as the loss, and a dict as the report",
            code="megatron.loss-result",
        )
    loss, report = results[0], results[-1]
    if loss.numel() != 1:
        raise TesseraError(
            f"loss_func returned a loss of shape {list(loss.shape)}",
            where=_WHERE,
            fix="return its sum or mean",
            code="megatron.loss-shape",
        )
    per_token = _reads(config, "calculate_per_token_loss")
    if len(results) == 3:
        tokens = torch.as_tensor(results[1], device=loss.device).detach().to(torch.int)
        if not per_token:
            loss /= tokens
    if not (len(results) == 3 and per_token):
        loss *= parallel_state.get_context_parallel_world_size()
        loss /= num_microbatches
    forward_data_store.append(report)
    return loss, tokens


def _reads(config: ModelParallelConfig, name: str) -> bool:
    """Return a boolean field of a configuration; False if it has no such field."""
    return bool(vars(config).get(name, False))


def backward_step(
    input_tensor: Tensor | None, output_tensor: Tensor, output_tensor_grad: Tensor | None, config: ModelParallelConfig
) -> Tensor | None:
    """Run the backward pass of one micro-batch and return the gradient of the stage's input."""
    if output_tensor_grad is None and config.grad_scale_func is not None:
        output_tensor = config.grad_scale_func(output_tensor)
    if output_tensor.requires_grad:
        torch.autograd.backward(output_tensor, grad_tensors=output_tensor_grad)
    return None if input_tensor is None else input_tensor.grad


# ------------------------------------------------------------------------------------------------------- orders


def one_forward_one_backward(microbatches: int, stage: int, stages: int) -> list[Pass]:
    """Return the order of passes in 1F1B: some forward passes first, then forward and backward in turn.

    Later stages run fewer forward passes first.
    """
    return _in_turn([(number, 0) for number in range(microbatches)], min(stages - stage - 1, microbatches), 1)


def get_schedule_table(num_microbatches: int, num_model_chunks: int, group: int) -> list[tuple[int, int]]:
    """Return the order of forward passes in the interleaved schedule, as pairs (micro-batch, model chunk)."""
    return [
        (number, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_model_chunks)
        for number in range(start, min(start + group, num_microbatches))
    ]


def interleaved(microbatches: int, chunks: int, group: int, stage: int, stages: int) -> list[Pass]:
    """Return the order of passes in the interleaved schedule, with several model chunks on each stage."""
    table = get_schedule_table(microbatches, chunks, group)
    ahead = min(2 * (stages - stage - 1) + (chunks - 1) * group, len(table))
    return _in_turn(table, ahead, chunks)


def _in_turn(table: Sequence[tuple[int, int]], ahead: int, chunks: int) -> list[Pass]:
    """Return `ahead` forward passes, then both kinds in turn, then the rest of the backward passes.

    Backward passes visit the model chunks in reverse order.
    """
    forward: list[Pass] = [("forward", number, chunk) for number, chunk in table]
    backward: list[Pass] = [("backward", number, chunks - 1 - chunk) for number, chunk in table]
    order = forward[:ahead]
    for step, forward_pass in enumerate(forward[ahead:]):
        order += [forward_pass, backward[step]]
    return order + backward[len(forward) - ahead :]


# ------------------------------------------------------------------------------------------------------- schedules


def _single(value: Any, what: str) -> Any:
    if isinstance(value, list):
        if len(value) != 1:
            raise TesseraError(
                f"this schedule takes a single {what}, not a list of {len(value)}",
                where=_WHERE,
                code="megatron.several-models",
            )
        return value[0]
    return value


def _sync(config: ModelParallelConfig) -> Callable[[], AbstractContextManager[Any]]:
    func = config.no_sync_func
    if isinstance(func, list):
        funcs = list(func)

        def all_chunks() -> AbstractContextManager[Any]:
            stack = ExitStack()
            for enter in funcs:
                stack.enter_context(enter())
            return stack

        return all_chunks
    return func if func is not None else nullcontext


def _call_for_each(functions: Any, models: list[nn.Module]) -> None:
    """Call `functions`, a function or a list with one per model chunk, with the parameters of each model chunk."""
    for number, model in enumerate(models):
        function = functions[number] if isinstance(functions, list) else functions
        if function is not None:
            function(model.parameters())


def _finish(config: ModelParallelConfig, models: list[nn.Module], tokens: Tensor) -> None:
    _call_for_each(config.grad_sync_func, models)
    if config.finalize_model_grads_func is not None:
        per_token = _reads(config, "calculate_per_token_loss")
        config.finalize_model_grads_func(models, tokens if per_token else None)


def _check(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise TesseraError(
            f"num_microbatches is {num_microbatches}",
            where=_WHERE,
            fix="pass at least 1",
            code="megatron.micro-batch-count",
        )


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
) -> list[Any]:
    """Run all micro-batches in a row and return their reports. Gradients are exchanged after the last micro-batch."""
    _check(num_microbatches)
    model, data_iterator = _single(model, "model"), _single(data_iterator, "data iterator")
    config = get_model_config(model)
    reports: list[Any] = []
    total = torch.zeros((), dtype=torch.int, device=devices.current())

    def run() -> None:
        output, tokens = forward_step(
            forward_step_func, data_iterator, model, num_microbatches, None, reports, config, collect_non_loss_data
        )
        total.add_(tokens)
        if not forward_only:
            backward_step(None, output, None, config)

    with _sync(config)():
        for _ in range(num_microbatches - 1):
            run()
    run()
    if not forward_only:
        _finish(config, [model], total)
    return reports


def _run_pipeline(
    order: list[Pass],
    models: list[nn.Module],
    iterators: list[Any],
    forward_step_func: Callable[..., Any],
    num_microbatches: int,
    shape: tuple[int, int, int],
    collect_non_loss_data: bool,
    forward_only: bool,
) -> list[Any]:
    """Run the forward and backward passes of this rank in order. Return the reports on the last stage."""
    config = get_model_config(models[0])
    messages = Messages(config, shape, len(models))
    chunked = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    _call_for_each(config.param_sync_func, models)
    reports: list[Any] = []
    waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    total = torch.zeros((), dtype=torch.int, device=devices.current())
    last = len(order) - 1 - next((at for at, one in enumerate(reversed(order)) if one[0] == "backward"), len(order))
    with ExitStack() as stack:
        unsynchronized = stack.enter_context(ExitStack())
        unsynchronized.enter_context(_sync(config)())
        for at, (kind, number, chunk) in enumerate(order):
            if chunked:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            if at == last:
                unsynchronized.close()  # the last backward pass of a chunk: its gradients are exchanged
            if kind == "forward":
                received = messages.receive_forward(chunk)
                output, tokens = forward_step(
                    *(forward_step_func, iterators[chunk], models[chunk], num_microbatches, received, reports, config),
                    collect_non_loss_data=collect_non_loss_data,
                    is_last_stage=messages.is_last(chunk),
                )
                total.add_(tokens)
                messages.send_forward(output, chunk)
                if not forward_only:
                    waiting[number, chunk] = received, output
            else:
                received, output = waiting.pop((number, chunk))
                gradient = backward_step(received, output, messages.receive_backward(chunk), config)
                messages.send_backward(gradient, chunk)
    messages.finish()
    if not forward_only:
        _finish(config, models, total)
    return reports


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
) -> list[Any]:
    """Run all micro-batches by the 1F1B schedule. Return the reports on the last stage, an empty list elsewhere."""
    _check(num_microbatches)
    model, data_iterator = _single(model, "model"), _single(data_iterator, "data iterator")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    order = one_forward_one_backward(num_microbatches, stage, parallel_state.get_pipeline_model_parallel_world_size())
    shape = get_tensor_shape(get_model_config(model), seq_length, micro_batch_size)
    passes = [one for one in order if one[0] == "forward" or not forward_only]
    return _run_pipeline(
        passes,
        [model],
        [data_iterator],
        forward_step_func,
        num_microbatches,
        shape,
        collect_non_loss_data,
        forward_only,
    )


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
) -> list[Any]:
    """Run all micro-batches by the interleaved schedule. `model` and `data_iterator` have an entry for each chunk."""
    _check(num_microbatches)
    if not isinstance(model, list) or not isinstance(data_iterator, list) or len(model) != len(data_iterator):
        raise TesseraError(
            "the interleaved schedule takes a list of model chunks and a list of data iterators of the same length",
            where=_WHERE,
            fix="build a model for each chunk, as get_model does, and an iterator for each chunk",
            code="megatron.chunks-missing",
        )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = get_model_config(model[0])
    group = config.microbatch_group_size_per_vp_stage or stages
    if config.pipeline_model_parallel_size != stages:  # the script did not set this field of its configuration
        group = max(group, stages)
    rest = num_microbatches % group
    if not stages <= group <= num_microbatches or 0 < rest < stages:
        raise TesseraError(
            f"{num_microbatches} micro-batches cannot be run in groups of {group} on {stages} pipeline stages",
            where="microbatch_group_size_per_vp_stage",
            fix=f"use a multiple of {stages} micro-batches, and groups of at least {stages}",
            code="megatron.micro-batch-groups",
        )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    order = interleaved(num_microbatches, len(model), group, stage, stages)
    passes = [one for one in order if one[0] == "forward" or not forward_only]
    shape = get_tensor_shape(config, seq_length, micro_batch_size)
    return _run_pipeline(
        passes, model, data_iterator, forward_step_func, num_microbatches, shape, collect_non_loss_data, forward_only
    )
