"""Names in the recording: which module a rank is in, and in which phase of a step.

Only forward calls are marked. Backward needs no marks: autograd numbers what forward did, and the recording of a
backward function tells that number (see `owners`). So nothing is added to the graph, and a step computes what it always
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from tessera.core.names import clean

FORWARD, RECOMPUTE, PHASE = "tessera::forward ", "tessera::recompute ", "tessera::phase "
MODEL = "(model)"  # the outermost module's own work
_DEPTH = 3  # names of modules that lie in no block


class Marks:
    """Ranges around the calls of modules, and one around each phase. `close` leaves everything as it was."""

    def __init__(self, module: nn.Module, blocks: Iterable[str]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._phase: Any = None
        for path, part in followed(module, set(blocks)):
            if part._compiled_call_impl is not None:
                self._around_compiled(path, part)
            else:
                self._hook(path, part)

    def phase(self, doing: str) -> None:
        """The host turns to something else."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = _RecordFunctionFast(PHASE + doing)
        self._phase.__enter__()

    def close(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _hook(self, path: str, module: nn.Module) -> None:
        open_: list[Any] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            open_.append(_range(path))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if open_:
                open_.pop().__exit__(None, None, None)

        # First in and last out: what gathers and frees weights is a hook too, and belongs to the module.
        before = module.register_forward_pre_hook(enter, prepend=True)
        # Also after an error: recompute ends a forward pass by one as soon as it has what it needs.
        after = module.register_forward_hook(leave, always_call=True)
        self._undo += [before.remove, after.remove]

    def _around_compiled(self, path: str, module: nn.Module) -> None:
        """Hooks of a compiled module are part of what was compiled, and new ones are not seen. The call is outside."""
        call = module._compiled_call_impl
        assert call is not None

        def run(*args: Any, **options: Any) -> Any:
            mark = _range(path)
            try:
                return call(*args, **options)
            finally:
                mark.__exit__(None, None, None)

        def undo() -> None:
            module._compiled_call_impl = call

        module._compiled_call_impl = run
        self._undo.append(undo)


def _range(path: str) -> Any:
    # Within backward, forward runs only because something is computed again.
    again = torch._C._current_graph_task_id() != -1
    mark = _RecordFunctionFast((RECOMPUTE if again else FORWARD) + path)
    mark.__enter__()
    return mark


def followed(module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Down to the parts of a block; elsewhere to a depth that a table can show. Nothing below a compiled module."""
    closed: set[str] = set()
    for name, part in module.named_modules():
        if any(name.startswith(f"{above}.") for above in closed):
            continue
        if part._compiled_call_impl is not None:
            if not name:
                yield MODEL, part
                return
            closed.add(name)
        path = clean(f"{name}.").removesuffix(".")  # a wrapper stands for what it wraps
        if not path:
            yield MODEL, part
            continue
        block = _block_above(path, blocks)
        if block is None:
            if path.count(".") < _DEPTH:
                yield path, part
        elif path.count(".") <= block.count(".") + 1:
            yield path, part


def _block_above(path: str, blocks: set[str]) -> str | None:
    """The innermost block that is this module or holds it."""
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return None
