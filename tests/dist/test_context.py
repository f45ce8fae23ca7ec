"""Rows and pictures shared by several ranks give the numbers of one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tessera.core.batch import Segments
from tessera.nn.layers import PackedAttention
from tessera.parallel.context_parallel import ContextAttention
from tessera.parallel.mesh import CONTEXT, RING, SHARD, ULYSSES, Axes, Mesh
from tessera.parallel.sequence_sharding import SequenceSharding, take
from tests.dist.layout_cases import CONTEXT as CONTEXT_ROWS
from tests.dist.layouts import Case, good, measure_selected, params
from tests.dist.spawn import run_ranks


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("case", params(CONTEXT_ROWS))
def test_a_shared_row_trains_as_a_whole_one(case: Case, measured: dict[str, dict[str, float]]) -> None:
    assert good(measured[case.name]), measured[case.name]


@dataclass(frozen=True)
class Shared:
    """Attention alone, in double precision: here a wrong extent cannot hide behind rounding."""

    ring: int
    ulysses: int
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    causal: bool = True
    unit: int = 1


STRADDLING = (5, 1, 9, 0, 17, 8)  # 40 tokens: segments begin and end inside of chunks
ATTENTION = [
    *(Shared(2, 2, lengths, causal=c) for lengths in ((40,), STRADDLING, (10,) * 4, (1,) * 40) for c in (True, False)),
    *(Shared(4, 1, lengths, causal=c) for lengths in ((43,), STRADDLING) for c in (True, False)),
    Shared(1, 4, (3, 20, 14)),
    Shared(2, 2, (20, 24), causal=False, unit=4),
    Shared(2, 2, (3, 20, 14), heads=3, kv_heads=1),
    Shared(3, 1, (3, 20, 14, 10)),
    Shared(1, 3, (3, 20, 14), heads=8),  # the second rank's queries do not fall into groups of one size
    Shared(1, 3, (19,), heads=3, kv_heads=3, causal=False),
]


@pytest.mark.parametrize("world", [3, 4])
def test_attention_over_ranks_is_attention(world: int) -> None:
    cases = [case for case in ATTENTION if case.ring * case.ulysses == world]
    assert cases
    for case, errors in zip(cases, zip(*run_ranks(attention_errors, world, cases), strict=True), strict=True):
        assert max(errors) < 1e-12, case


def attention_errors(rank: int, world: int, cases: list[Shared]) -> list[float]:
    meshes = {
        (case.ring, case.ulysses): Axes({SHARD: 1, RING: case.ring, ULYSSES: case.ulysses}, {CONTEXT: (RING, ULYSSES)})
        for case in cases
    }
    by_key = {key: Mesh(axes, torch.device("cpu")) for key, axes in meshes.items()}
    return [attention_error(case, by_key[case.ring, case.ulysses]) for case in cases]


def attention_error(case: Shared, mesh: Mesh) -> float:
    rows, split = sum(case.lengths), SequenceSharding(case.ring, case.ulysses, case.unit)
    generator = torch.Generator().manual_seed(rows)
    whole = [
        torch.randn(rows, count, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (case.heads, case.kv_heads, case.kv_heads)
    ]
    weights = torch.randn(rows, case.heads, 8, generator=generator, dtype=torch.float64)
    core, segments = PackedAttention(case.causal, "sdpa"), Segments.of(case.lengths)
    ranges = split.ranges(rows, mesh.position(CONTEXT))
    out = core(*whole, segments)
    expected = [take(x, ranges, 0) for x in (out, *torch.autograd.grad(out, whole, weights))]
    shared = ContextAttention(core, split, mesh)
    assert torch.equal(shared(*whole, segments), out)  # rows that nobody has shared, as in generating
    mine = [take(x.detach(), ranges, 0).requires_grad_() for x in whole]
    out = shared(*mine, segments)
    results = [out, *torch.autograd.grad(out, mine, take(weights, ranges, 0))]
    return max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True))
