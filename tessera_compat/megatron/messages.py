"""Send hidden states and their gradients between pipeline stages.

A message is sent as soon as it exists and received where it is needed. Each kind of message has its own process group,
in which all ranks agree on the order, so no message waits behind one of another kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import ModelParallelConfig


@dataclass
class Messages:
    """Send and receive hidden states and their gradients between stages."""

    config: ModelParallelConfig
    shape: tuple[int, int, int]
    chunks: int
    unfinished: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.stages = parallel_state.get_pipeline_model_parallel_world_size()
        if self.config.pipeline_dtype is None:
            raise TesseraError(
                "pipeline stages need the dtype of the activations that they exchange",
                where="TransformerConfig.pipeline_dtype",
                fix="set pipeline_dtype to the dtype of the model, such as torch.float32",
                code="megatron.pipeline-dtype",
            )

    def is_first(self, chunk: int) -> bool:
        return self.stage == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return self.stage == self.stages - 1 and chunk == self.chunks - 1

    def _next(self, backward: bool) -> tuple[int, Any]:
        wraps = self.stage == self.stages - 1
        return (
            parallel_state.get_pipeline_model_parallel_next_rank(),
            parallel_state.get_pipeline_message_group(wraps, backward),
        )

    def _previous(self, backward: bool) -> tuple[int, Any]:
        wraps = self.stage == 0
        return (
            parallel_state.get_pipeline_model_parallel_prev_rank(),
            parallel_state.get_pipeline_message_group(wraps, backward),
        )

    def _send(self, tensor: Tensor, to: tuple[int, Any]) -> None:
        peer, group = to
        dtype = self.config.pipeline_dtype
        tensor = tensor.detach().to(dtype).contiguous()
        if self.config.variable_seq_lengths:
            sizes = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
            self._start(sizes, peer, group)
        elif tuple(tensor.shape) != self.shape:
            raise TesseraError(
                f"a pipeline stage sends the shape {list(tensor.shape)}, the schedule expects {list(self.shape)}",
                where="forward_backward_func",
                fix="pass the seq_length and micro_batch_size of the batches, or set variable_seq_lengths=True",
                code="megatron.activation-shape",
            )
        self._start(tensor, peer, group)

    def _start(self, tensor: Tensor, peer: int, group: Any) -> None:
        self.unfinished = [(work, kept) for work, kept in self.unfinished if not work.is_completed()]
        work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self.unfinished.append((work, tensor))

    def _receive(self, source: tuple[int, Any]) -> Tensor:
        peer, group = source
        device = devices.current()
        shape: Iterable[int] = self.shape
        if self.config.variable_seq_lengths:
            sizes = torch.empty(len(self.shape), dtype=torch.int64, device=device)
            _wait(dist.irecv(sizes, peer, group=group))
            shape = sizes.tolist()
        tensor = torch.empty(tuple(shape), dtype=self.config.pipeline_dtype, device=device)
        _wait(dist.irecv(tensor, peer, group=group))
        return tensor

    def send_forward(self, output: Tensor, chunk: int) -> None:
        if not self.is_last(chunk):
            self._send(output, self._next(backward=False))

    def receive_forward(self, chunk: int) -> Tensor | None:
        return None if self.is_first(chunk) else self._receive(self._previous(backward=False)).requires_grad_()

    def send_backward(self, gradient: Tensor | None, chunk: int) -> None:
        if not self.is_first(chunk):
            assert gradient is not None, "a stage that receives its input has a gradient for it"
            self._send(gradient, self._previous(backward=True))

    def receive_backward(self, chunk: int) -> Tensor | None:
        return None if self.is_last(chunk) else self._receive(self._next(backward=True))

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self.unfinished:
            work.wait()
        self.unfinished = []


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def get_tensor_shape(config: ModelParallelConfig, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
    """Return the shape of hidden states between stages."""
    length = seq_length // parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    return length, micro_batch_size, int(vars(config)["hidden_size"])
