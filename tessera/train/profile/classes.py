"""What kind of work a kernel or an operation is, told from its name; and the arithmetic of matrix products."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from tessera.core.device import COLLECTIVE_BACKENDS

PRODUCTS, ATTENTION, POINTWISE, REDUCTIONS = "matrix products", "attention", "norm and pointwise", "reductions"
COPIES, TRANSFERS, COLLECTIVES, OTHER = "copies", "host-device copies", "collectives", "other kernels"
PYTHON, IDLE, WAITING = "host alone (Python)", "device idle", "waiting for data"

_COLLECTIVE = "|".join(
    (*COLLECTIVE_BACKENDS, "c10d::", "_c10d_functional", "allreduce", "all_gather", "reduce_scatter")
)
# The first that fits counts. Names of device kernels and of host operations are in one table: they do not contradict.
_RULES = tuple(
    (kind, re.compile(words, re.IGNORECASE))
    for kind, words in (
        (TRANSFERS, r"memcpy (?:htod|dtoh)|memcpy \w+ -> \w+ \((?:pinned|pageable)"),
        (COPIES, r"^memcpy|^memset"),
        (COLLECTIVES, _COLLECTIVE),
        (ATTENTION, r"flash|fmha|attention|sdpa|mha_|attn"),
        (
            PRODUCTS,
            r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|conv(?:olution|[123]d|_depthwise)|splitk|"
            r"^aten::(?:_scaled_|_grouped_)?(?:mm|addmm|bmm|baddbmm|linear|dot|mv|addmv|_addmm_activation|outer)$",
        ),
        (POINTWISE, r"triton_(?:poi|per|red|mix)|norm|gammabeta|softmax|gelu|silu|swiglu|sigmoid|rope"),
        (COPIES, r"copy|::cat$|catarray|index_select|gather|scatter|clone|contiguous|_to_copy|pin_memory"),
        (REDUCTIONS, r"reduce|^aten::(?:sum|mean|amax|amin|max|min|any|all|argmax|logsumexp|cumsum|sort|topk)$"),
        (POINTWISE, r"elementwise|vectorized|multi_tensor|foreach|fused_adam|adamw|fill|functor|^aten::\w+_?$"),
    )
)
_PRODUCT_SHAPES = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}


def kind_of(name: str) -> str:
    return next((kind for kind, words in _RULES if words.search(name)), OTHER)


def kind_on_host(name: str) -> str:
    """Of an event on the host: what is no operation is Python on its way to the next one."""
    known = name.startswith(("aten::", "c10d::", "_c10d")) or any(name.startswith(b) for b in COLLECTIVE_BACKENDS)
    if known:
        return kind_of(name)
    return POINTWISE if name.startswith(("triton_", "cpp_fused")) else PYTHON


def product_flops(name: str, shapes: Sequence[Any]) -> int:
    """Multiplications and additions of a product; 0 where the shapes do not tell."""
    first = _PRODUCT_SHAPES.get(name)
    if first is None or len(shapes) < first + 2:
        return 0
    left, right = shapes[first], shapes[first + 1]
    if len(left) < 2 or len(right) < 2 or not all(isinstance(n, int) for n in (*left, *right)):
        return 0
    return int(2 * math.prod(left) * right[-1])
