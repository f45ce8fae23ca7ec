"""Keep named random streams beside torch's own, on any device, as `megatron.core.tensor_parallel.random`.

Ranks of one tensor-parallel group share torch's stream, so that dropout of replicated tensors is the same. For sharded
tensors each rank has its own stream (`model-parallel-rng`). Names contain cuda, as in the copied API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tessera.errors import TesseraError, nearest
from tessera.runtime import device as devices
from tessera.runtime.rng import derive
from tessera_compat.megatron import parallel_state
from tessera_compat.state import current

MODEL_PARALLEL = "model-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"


def _stream() -> Any:
    """Return the torch module with `get_rng_state` and `set_rng_state` of the current device."""
    device = devices.current()
    return torch if device.type == "cpu" else torch.get_device_module(device)


class CudaRNGStatesTracker:
    """Store states of random number generators by name. `fork` switches to one of them for a block."""

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def reset(self) -> None:
        """Remove all random streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a random stream. Its seed must differ from those of all other streams."""
        if seed in self.seeds_:
            raise TesseraError(
                f"another random stream already has the seed {seed}",
                where=f"add({name!r})",
                code="megatron.random-seed-taken",
            )
        if name in self.states_:
            raise TesseraError(
                f"a random stream {name!r} exists already",
                where="add",
                fix="call reset() first",
                code="megatron.random-stream-exists",
            )
        self.seeds_.add(seed)
        stream = _stream()
        before = stream.get_rng_state()
        stream.manual_seed(seed)
        self.states_[name] = stream.get_rng_state()
        stream.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the stream `name` in this block. Then switch back."""
        if name not in self.states_:
            raise TesseraError(
                f"there is no random stream {name!r}",
                nearest=nearest(name, self.states_),
                fix="call model_parallel_cuda_manual_seed(seed) after initialize_model_parallel",
                code="megatron.random-stream-missing",
            )
        stream = _stream()
        before = stream.get_rng_state()
        stream.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = stream.get_rng_state()
            stream.set_rng_state(before)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the random state tracker of this run."""
    state = current()
    if state.rng is None:
        state.rng = CudaRNGStatesTracker()
    tracker: CudaRNGStatesTracker = state.rng
    return tracker


def initialize_rng_tracker(use_te_rng_tracker: bool = False, **options: bool) -> None:
    """Create the random state tracker of this run, unless it exists."""
    refused = [name for name, value in {"use_te_rng_tracker": use_te_rng_tracker, **options}.items() if value]
    if refused:
        raise TesseraError(
            f"{refused[0]}=True is not supported: there is one kind of tracker",
            code="megatron.unsupported-argument",
        )
    get_cuda_rng_tracker()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> None:
    """Seed torch's generator on the current device, and the named streams of this rank as Megatron 0.12.1 does.

    Without an accelerator this seeds the generator of the host.
    """
    initialize_rng_tracker(
        te_rng_tracker, inference_rng_tracker=inference_rng_tracker, use_cudagraphable_rng=use_cudagraphable_rng
    )
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    _stream().manual_seed(seed)
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + parallel_state.get_tensor_model_parallel_rank())
    expert = 100 * parallel_state.get_expert_model_parallel_rank() + parallel_state.get_expert_tensor_parallel_rank()
    tracker.add(EXPERT_PARALLEL, seed + 1024 + expert)


@contextmanager
def model_parallel_stream() -> Iterator[None]:
    """Draw random numbers from the stream that differs between tensor-parallel ranks.

    Without seeded streams, torch's generator is used.
    """
    tracker = get_cuda_rng_tracker()
    if not tracker.is_initialized():
        yield
        return
    with tracker.fork():
        yield


@contextmanager
def layout_independent_init(*words: object) -> Iterator[None]:
    """Seed the host's generator in this block, from the process seed and `words`, the name of a part of the model.

    Each part then gets the same initial weights on any number of ranks.
    """
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the accelerator's generator as well.
        torch.default_generator.manual_seed(derive(torch.initial_seed(), "megatron init", *words))
        yield


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Run a function without storing its activations. Backward recomputes them with the same random numbers."""
    if distribute_saved_activations:
        raise TesseraError(
            "distribute_saved_activations=True is not supported", fix="pass False", code="megatron.unsupported-argument"
        )
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    recomputing = [False]

    def with_streams(*inputs: Any) -> Any:
        if not recomputing[0]:
            recomputing[0] = True
            return function(*inputs)
        after = tracker.get_states()
        tracker.set_states(dict(states))
        try:
            return function(*inputs)
        finally:
            tracker.set_states(after)

    return torch_checkpoint(with_streams, *args, use_reentrant=False)
