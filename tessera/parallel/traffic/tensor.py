"""What ranks that compute layers together send each other in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.parallel.axes import TENSOR, TENSOR_TOWER
from tessera.parallel.plan import Plan
from tessera.parallel.planning.holdings import Piece
from tessera.parallel.traffic.lines import Kind, Traffic

LOSS_CHUNK = 2048  # positions of which ranks exchange, at a time, what the loss needs: see ops.loss
LOSS_NUMBERS = 3  # fp32 of each


def tensor_traffic(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    if plan.tensor is None:
        return
    weights = {piece.name: piece for piece in here}
    for path in _there(plan.tensor.entries, weights):
        column = _first_column(plan, path)
        if f"{column}.weight" in weights:
            yield from _crossing(plan, path, weights[f"{column}.weight"].shape[1], enters=True)
    for path, cut in plan.tensor.layers.items():
        if f"{path}.weight" not in weights:
            continue
        shape = weights[f"{path}.weight"].shape
        if cut == "row":
            yield from _crossing(plan, path, shape[0], enters=False)
    yield from _table(plan, weights)
    yield from _parts_of_tokens(plan, here)
    yield from _partial_gradients(plan, here)


def _crossing(plan: Plan, path: str, width: int, enters: bool) -> Iterator[Traffic]:
    """Into layers cut by columns, or out of one cut by rows. Where each rank keeps a part of the tokens, they are
    gathered on the way in and dealt on the way out; otherwise only sums are taken."""
    assert plan.tensor is not None
    view = TENSOR_TOWER if plan.tensor.in_tower(path) else TENSOR
    if plan.axes.size(view) == 1:
        return
    size = plan.rows_at(path) * width * plan.param_dtype.itemsize
    again = _computed_again(plan, path, enters)
    trained = int(plan.gradient_reaches(path))
    if plan.tensor.in_decoder(path):
        forward: Kind = "all-gather" if enters else "reduce-scatter"
        backward: Kind = "reduce-scatter" if enters else "all-gather"
        yield _times(plan, view, forward, 1 + again, size)
        yield _times(plan, view, backward, trained, size)
    elif enters:
        yield _times(plan, view, "all-reduce", trained, size)
    else:
        yield _times(plan, view, "all-reduce", 1 + again, size)


def _table(plan: Plan, weights: dict[str, Piece]) -> Iterator[Traffic]:
    """The table of tokens, where they are looked up, and the head where the loss reads one."""
    assert plan.tensor is not None
    ranks, tokens = plan.axes.size(TENSOR), plan.rows[""]
    tables = [path for path, cut in plan.tensor.layers.items() if cut == "vocab" and f"{path}.weight" in weights]
    if not tables:
        return
    width = weights[f"{tables[0]}.weight"].shape[1] * plan.param_dtype.itemsize
    if _begins(plan, weights):
        yield _times(plan, TENSOR, "all-reduce", 1, tokens * width)
    if _ends(plan, weights):
        yield _times(plan, TENSOR, "all-reduce", 1, tokens * width)
        chunks = -(-tokens // LOSS_CHUNK)
        size = tokens * LOSS_NUMBERS * 4 * ranks
        yield Traffic(_axis(plan, TENSOR), "all-gather", chunks * plan.microbatches, size * plan.microbatches)


def _parts_of_tokens(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    """Where the decoder, in which each rank has a part of the tokens, begins and ends."""
    assert plan.tensor is not None
    inside = [piece for piece in here if plan.tensor.in_decoder(piece.name)]
    if not plan.tensor.sequence or not inside:
        return
    width = next(p.shape[0] for p in plan.pieces if plan.tensor.styles[p.name] == "sequence")
    size = plan.rows[""] * width * plan.param_dtype.itemsize
    passes = plan.microbatches * _stages_with_decoder(plan, inside)
    yield Traffic(_axis(plan, TENSOR), "all-gather", 2 * passes, 2 * passes * size)


def _partial_gradients(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    """Of norms that saw a part of the tokens, or of the heads: summed when the step ends."""
    assert plan.tensor is not None
    partial = [piece for piece in here if piece.trained and plan.tensor.partial(piece.name)]
    for view in (TENSOR, TENSOR_TOWER):
        held = [p.held for p in partial if plan.tensor.in_tower(p.name) == (view == TENSOR_TOWER)]
        if held and plan.axes.size(view) > 1:
            yield Traffic(_axis(plan, view), "all-reduce", 1, sum(held) * plan.storage_dtype.itemsize)


def _times(plan: Plan, view: str, kind: Kind, passes: int, size: int) -> Traffic:
    count = passes * plan.microbatches
    return Traffic(_axis(plan, view), kind, count, count * size)


def _axis(plan: Plan, view: str) -> str:
    return plan.axes.label(view)


def _computed_again(plan: Plan, path: str, enters: bool) -> int:
    """1 inside of a recomputed module; but recomputing stops short of the last product's sum, which nobody keeps."""
    for part in plan.recompute:
        if path == part.path or path.startswith(part.path + "."):
            return 1 if enters or not _last_in(plan, part.path, path) else 0
    return 0


def _last_in(plan: Plan, module: str, path: str) -> bool:
    assert plan.tensor is not None
    return path == [layer for layer in plan.tensor.layers if layer.startswith(module + ".")][-1]


def _first_column(plan: Plan, path: str) -> str:
    assert plan.tensor is not None
    if path in plan.tensor.layers:
        return path
    return next(p for p, cut in plan.tensor.layers.items() if p.startswith(path + ".") and cut == "column")


def _there(paths: Sequence[str], weights: dict[str, Piece]) -> list[str]:
    return [path for path in paths if any(name.startswith(path + ".") for name in weights)]


def _begins(plan: Plan, weights: dict[str, Piece]) -> bool:
    """Whether tokens are looked up here: in a pipeline, not where the table is a copy for the head."""
    first = next(piece.name for piece in plan.pieces if piece.name == _tables(plan)[0])
    if plan.pipeline is None:
        return first in weights
    return first in weights and plan.pipeline.owner[plan.pipeline.home(first)] in _positions(plan, weights)


def _ends(plan: Plan, weights: dict[str, Piece]) -> bool:
    if plan.pipeline is None:
        return True
    last = plan.pipeline.stages[-1].modules
    return any(name.startswith(path + ".") for name in weights for path in last)


def _tables(plan: Plan) -> list[str]:
    assert plan.tensor is not None
    return [f"{path}.weight" for path, cut in plan.tensor.layers.items() if cut == "vocab"]


def _positions(plan: Plan, weights: dict[str, Piece]) -> set[int]:
    assert plan.pipeline is not None
    return {plan.pipeline.owner[plan.pipeline.home(name)] for name in weights if name not in plan.pipeline.copies}


def _stages_with_decoder(plan: Plan, inside: Sequence[Piece]) -> int:
    if plan.pipeline is None:
        return 1
    return len({plan.pipeline.home(piece.name) for piece in inside if piece.name not in plan.pipeline.copies})
