"""The fused operators, with the schemas that the library of torch_npu 2.14.0 registers.

Values and constraints are those of its documentation. Forward computes in float32 and rounds once; torch's autograd
differentiates it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SCHEMAS = (
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
)
NAMES = tuple(schema.partition("(")[0] for schema in SCHEMAS)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check(input.dtype in FLOATS and gamma.dtype == input.dtype, "gamma and input have one dtype of float16 to float32")
    _check(1 <= input.dim() <= 8 and gamma.shape == input.shape[-gamma.dim() :], "gamma has the last dimensions")
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    _check(input.dtype in FLOATS and input.shape[dim] % 2 == 0, "two halves of float16 to float32")
    gate, up = input.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: object = None) -> Tensor:
    _check(rotate is None and input.dtype in FLOATS, "no matrix, float16 to float32")
    batch, length, heads, size = input.shape  # BSND
    _check(size % 2 == 0 and size < 896, "an even head size below 896")
    _check((batch < 1000 and heads < 1000) if rotary_mode == "half" else batch * heads < 1000, "fewer than 1000 heads")
    _check(r1.shape == r2.shape == (1, length, 1, size), "angles have the shape 1S1D")
    _check(r1.dtype == r2.dtype == input.dtype, "angles have the dtype of the input")
    _check(not (r1.requires_grad or r2.requires_grad), "angles need no gradients")
    wide = input.float()
    if rotary_mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        _check(rotary_mode == "interleave", "the mode is half or interleave")
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return (wide * r1.float() + turned * r2.float()).to(input.dtype)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: object = None,
    padding_mask: object = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: object = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: object = None,
    dropout_mask: object = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attend in layout TND, with sums of lengths on the host, and no mask or the compressed causal one."""
    _check(query.dtype in FLOATS and query.dtype == key.dtype == value.dtype, "one dtype of float16 to float32")
    _check(input_layout == "TND" and actual_seq_qlen and actual_seq_kvlen, "TND needs the sums of lengths")
    tokens, heads, size = query.shape
    _check(heads == head_num and heads <= 256 and heads % key.shape[1] == 0, "heads are a multiple of key heads")
    _check(key.shape == value.shape and key.shape[2] == size and size <= 768, "one head size up to 768")
    _check(len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024, "at most 1024 sequences of variable length")
    _check(actual_seq_qlen[-1] == tokens and actual_seq_kvlen[-1] == key.shape[0], "the last sum is the length")
    _check(keep_prob == 1.0 and pse is None and padding_mask is None and sink is None, "not simulated")
    if atten_mask is None:
        _check(sparse_mode == 0, "a mode needs its mask")
    else:
        _check(sparse_mode in (2, 3) and atten_mask.shape == (2048, 2048), "modes 2 and 3 take a mask of 2048 x 2048")
        _check(atten_mask.dtype in (torch.bool, torch.uint8) and atten_mask.device == query.device, "a mask of bool")
        upper = torch.ones(8, 8, dtype=torch.bool).triu(1)
        _check(torch.equal(atten_mask[:8, :8].cpu().bool(), upper), "true hides the score")
    outputs, maxima, sums = [], [], []
    starts = zip(pairwise([0, *actual_seq_qlen]), pairwise([0, *actual_seq_kvlen]), strict=True)
    for (a, b), (c, d) in starts:
        groups = heads // key.shape[1]
        q, k, v = query[a:b].float(), key[c:d].float(), value[c:d].float()
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if atten_mask is not None:
            diagonal = 1 if sparse_mode == 2 else 1 + (d - c) - (b - a)
            hidden = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).triu(diagonal)
            scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        maxima.append(scores.amax(-1).T if scores.numel() else query.new_zeros(0, heads))
        sums.append((scores - scores.amax(-1, keepdim=True)).exp().sum(-1).T if scores.numel() else maxima[-1])
    of_rows = [torch.cat(parts).float().unsqueeze(-1).expand(-1, -1, 8) for parts in (maxima, sums)]
    return torch.cat(outputs).to(query.dtype), *of_rows, query.new_empty(0), 0, 0, 0


def _check(holds: object, rule: str) -> None:
    if not holds:
        raise RuntimeError(f"ERR01001 OPS invalid parameter: {rule}")


CALLS: Counter[str] = Counter()  # operator -> how often it ran on the device


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[function.__name__] += 1
        return function(*args, **kwargs)

    return call


LIBRARY = torch.library.Library("npu", "DEF")
for _schema in SCHEMAS:
    LIBRARY.define(_schema)
for _function in (npu_rms_norm, npu_swiglu, npu_rotary_mul, npu_fusion_attention):
    LIBRARY.impl(_function.__name__, _counted(_function), "CompositeImplicitAutograd")
