"""Classes of transformers, each with one planted fault, for `tessera compare FOLDER package.module:function`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn


def _language(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def scaled_attention(folder: Path) -> nn.Module:
    """The scale of one layer's attention is 1 % off."""
    model = _language(folder)
    model.model.layers[3].self_attn.scaling *= 1.01
    return model


def no_query_norm(folder: Path) -> nn.Module:
    """One layer does not normalize its queries."""
    model = _language(folder)
    model.model.layers[1].self_attn.q_norm = nn.Identity()
    return model


def one_router_row(folder: Path) -> nn.Module:
    """The router of one layer prefers an expert by 2 %."""
    model = _language(folder)
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight[3] *= 1.02
    return model


def shares_of_all_experts(folder: Path) -> nn.Module:
    """The shares of the chosen experts do not add up to 1 in one layer."""
    model = _language(folder)
    model.model.layers[1].mlp.gate.norm_topk_prob = False
    return model


def untied_head(folder: Path) -> nn.Module:
    """The head is a copy of the embedding with one other row."""
    model = _language(folder)
    weight = model.lm_head.weight.detach().clone()
    weight[7] *= 1.02
    model.lm_head.weight = nn.Parameter(weight)
    return model


def dropout_left_on(folder: Path) -> nn.Module:
    """One MLP drops 1 % of its outputs."""
    model = _language(folder)
    model.model.layers[2].mlp.register_forward_hook(
        lambda module, inputs, output: nn.functional.dropout(output, 0.01, training=True)
    )
    return model


def other_order_of_patches(folder: Path) -> nn.Module:
    """The merger joins its four patches in another order."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    model.model.visual.merger.register_forward_pre_hook(
        lambda module, inputs: (inputs[0].unflatten(0, (-1, 4))[:, [0, 2, 1, 3]].flatten(0, 1), *inputs[1:])
    )
    return model
