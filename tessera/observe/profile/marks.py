"""Mark the modules and the phases of a step as ranges in the recording of torch's profiler.

Only forward calls are marked: autograd numbers the nodes that forward creates, and a backward function carries that
number (see `table`). So nothing is added to the graph, and a step computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import nn

from tessera.parallel.modules import wrap_submodule
from tessera.runtime.modules import clean_name
from tessera.runtime.torch_internals import (
    ActivationWrapper,
    inside_backward,
    is_compiled,
    open_range,
    wrapped_module,
)

FORWARD, RECOMPUTE, PHASE = "tessera::forward ", "tessera::recompute ", "tessera::phase "
MODEL = "(model)"  # operations of the outermost module itself
_DEPTH = 3  # of names of modules outside of blocks


class Marks:
    """Mark the calls of modules and the phases of a step as ranges. `close` removes all marks."""

    def __init__(self, module: nn.Module, blocks: Iterable[str]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._end_phase: Callable[[], None] | None = None
        for name, path, part in list(followed(module, set(blocks))):
            if not is_compiled(part):
                self._hook(path, part)
            elif name:
                self._wrap(module, name, path)

    def phase(self, phase: str) -> None:
        """End the range of the last phase and begin the one of a new phase."""
        if self._end_phase is not None:
            self._end_phase()
        self._end_phase = open_range(PHASE + phase)

    def close(self) -> None:
        if self._end_phase is not None:
            self._end_phase()
            self._end_phase = None
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _hook(self, path: str, module: nn.Module) -> None:
        open_: list[Callable[[], None]] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            open_.append(_open_call(path))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if open_:
                open_.pop()()

        # First in and last out: the hooks that gather and free weights belong to the module, too.
        before = module.register_forward_pre_hook(enter, prepend=True)
        # Also after an error: recompute raises one to end a forward pass as soon as it has the tensors it needs.
        after = module.register_forward_hook(leave, always_call=True)
        self._undo += [before.remove, after.remove]

    def _wrap(self, root: nn.Module, name: str, path: str) -> None:
        """Put a module around a compiled one, which does not call hooks that are added after compilation."""
        wrap_submodule(root, name, lambda inner: MarkedCall(inner, path))
        self._undo.append(lambda: wrap_submodule(root, name, lambda marked: wrapped_module(cast(MarkedCall, marked))))


class MarkedCall(ActivationWrapper):
    """Call a compiled module inside a range of its name."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module)  # type: ignore[no-untyped-call]
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        end = _open_call(self.path)
        try:
            return wrapped_module(self)(*args, **kwargs)
        finally:
            end()


def _open_call(path: str) -> Callable[[], None]:
    # Inside backward, a forward call is recomputation.
    return open_range((RECOMPUTE if inside_backward() else FORWARD) + path)


def followed(module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield name, name without wrappers, and module, down to the parts of a block, elsewhere to a depth of three.

    Nothing below a compiled module is yielded.
    """
    closed: set[str] = set()
    for name, part in module.named_modules():
        if any(name.startswith(f"{above}.") for above in closed):
            continue
        if is_compiled(part):
            if not name:
                yield name, MODEL, part
                return
            closed.add(name)
        path = clean_name(f"{name}.").removesuffix(".")  # a wrapper has the name of the module that it wraps
        if not path:
            yield name, MODEL, part
            continue
        block = _block_above(path, blocks)
        if block is None:
            if path.count(".") < _DEPTH:
                yield name, path, part
        elif path.count(".") <= block.count(".") + 1:
            yield name, path, part


def _block_above(path: str, blocks: set[str]) -> str | None:
    """Return the innermost block that is this module or contains it."""
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return None
