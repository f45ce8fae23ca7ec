"""Megatron's GPT model computes what transformers computes from the same weights, for GPT-2 and for Llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tessera_compat import state
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import TransformerConfig
from tessera_compat.megatron.gpt_model import GPTModel, get_gpt_layer_local_spec
from tests.close import rounding

LENGTH, VOCABULARY, HIDDEN, HEADS, LAYERS = 12, 40, 32, 4, 2
BASE: dict[str, Any] = {
    **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True},
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    state.destroy()
    dist.destroy_process_group()


def by_group(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Return projections of all heads in Megatron's order: for each group its queries, its key, its value."""
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def transposed(x: Tensor) -> Tensor:
    """Return a weight of GPT-2 with outputs first; biases are as they are."""
    return x.t().contiguous()


def gpt2() -> tuple[Any, GPTModel]:
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
        **{"activation_function": "gelu", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    )
    peer = GPT2LMHeadModel(config).double()
    model = GPTModel(TransformerConfig(**BASE), get_gpt_layer_local_spec(), VOCABULARY, LENGTH).double()
    theirs = peer.state_dict()
    weights = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": theirs["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": theirs["transformer.ln_f.bias"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    names = {
        **{"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "self_attention.linear_proj": "attn.c_proj"},
        **{"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
    }
    for number in range(LAYERS):
        here, there = f"decoder.layers.{number}.", f"transformer.h.{number}."
        for ours, name in names.items():
            for kind in ("weight", "bias"):
                weights[f"{here}{ours}.{kind}"] = transposed(theirs[f"{there}{name}.{kind}"])
        for kind in ("weight", "bias"):
            parts = transposed(theirs[f"{there}attn.c_attn.{kind}"]).chunk(3)
            weights[f"{here}self_attention.linear_qkv.{kind}"] = by_group(*parts, HEADS)
    model.load_state_dict(weights)
    return peer, model


def llama() -> tuple[Any, GPTModel]:
    torch.manual_seed(0)
    groups, inner = 2, 48
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": groups, "rms_norm_eps": 1e-5},
    )
    peer = LlamaForCausalLM(config).double()
    ours = TransformerConfig(
        **BASE,
        num_query_groups=groups,
        ffn_hidden_size=inner,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(ours, spec, VOCABULARY, LENGTH, position_embedding_type="rope").double()
    theirs = peer.state_dict()
    weights = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for number in range(LAYERS):
        here, there = f"decoder.layers.{number}.", f"model.layers.{number}."
        projections = [theirs[f"{there}self_attn.{name}_proj.weight"] for name in "qkv"]
        weights[f"{here}self_attention.linear_qkv.weight"] = by_group(*projections, groups)
        weights[f"{here}self_attention.linear_proj.weight"] = theirs[f"{there}self_attn.o_proj.weight"]
        halves = [theirs[f"{there}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        weights[f"{here}mlp.linear_fc1.weight"] = torch.cat(halves)
        weights[f"{here}mlp.linear_fc2.weight"] = theirs[f"{there}mlp.down_proj.weight"]
        weights[f"{here}input_layernorm.weight"] = theirs[f"{there}input_layernorm.weight"]
        weights[f"{here}pre_mlp_layernorm.weight"] = theirs[f"{there}post_attention_layernorm.weight"]
    model.load_state_dict(weights)
    # Angles of transformers are float32, whatever the type of the model.
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.float()
    return peer, model


@pytest.mark.parametrize("build", [gpt2, llama])
@torch.no_grad()
def test_logits_and_losses_equal_transformers(build: Any) -> None:
    peer, model = build()
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand_as(tokens)
    expected = peer(tokens).logits
    # Rotary angles are float32 on both sides, so Llama agrees to that type.
    dtype = torch.float64 if build is gpt2 else torch.float32
    limit = rounding(HIDDEN * LAYERS, dtype) * float(expected.abs().max())
    assert float((model(tokens, positions, None) - expected).abs().max()) <= limit
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(3, 1, LENGTH, LENGTH)
    assert torch.equal(model(tokens, positions, causal), model(tokens, positions, None))
    loss = model(tokens, positions, None, labels=tokens)
    exact = F.cross_entropy(expected.flatten(0, 1), tokens.flatten(), reduction="none").view_as(loss)
    assert float((loss - exact).abs().max()) <= rounding(VOCABULARY, dtype) * float(exact.abs().max())
