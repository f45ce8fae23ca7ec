"""Our names of a text tower's parameters and those of Hugging Face folders."""

from __future__ import annotations

from tessera.core.weightmap import Part, Rule, Stack, Turned, WeightMap
from tessera.models._text.config import TextConfig

_PAIRS = (
    ("text.embed.weight", "embed_tokens.weight"),
    ("text.layers.{i}.attn_norm.weight", "layers.{i}.input_layernorm.weight"),
    ("text.layers.{i}.attn.q.{kind}", "layers.{i}.self_attn.q_proj.{kind}"),
    ("text.layers.{i}.attn.k.{kind}", "layers.{i}.self_attn.k_proj.{kind}"),
    ("text.layers.{i}.attn.v.{kind}", "layers.{i}.self_attn.v_proj.{kind}"),
    ("text.layers.{i}.attn.q_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    ("text.layers.{i}.attn.k_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
    ("text.layers.{i}.attn.o.weight", "layers.{i}.self_attn.o_proj.weight"),
    ("text.layers.{i}.mlp_norm.weight", "layers.{i}.post_attention_layernorm.weight"),
    ("text.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.gate_proj.weight"),
    ("text.layers.{i}.mlp.up.weight", "layers.{i}.mlp.up_proj.weight"),
    ("text.layers.{i}.mlp.down.weight", "layers.{i}.mlp.down_proj.weight"),
    ("text.layers.{i}.mlp.router.weight", "layers.{i}.mlp.gate.weight"),
    ("text.norm.weight", "norm.weight"),
)
_BUFFERS = ("rotary_emb.inv_freq", "layers.{i}.self_attn.rotary_emb.inv_freq")


def text_rules(text: TextConfig, prefix: str = "model.", *, stacked: bool = False) -> list[Rule]:
    """`prefix`: what the names of a folder begin with. Experts lie there one by one, or `stacked`."""
    rules = [Rule(ours, prefix + theirs) for ours, theirs in _PAIRS]
    if text.experts is not None and stacked:
        width = text.experts.moe_intermediate_size
        theirs, both = prefix + "layers.{i}.mlp.experts.", Turned(2 * width, text.hidden_size)
        rules += [
            Rule("text.layers.{i}.mlp.experts.gate", theirs + "gate_up_proj", Part(0, 2, 1, both)),
            Rule("text.layers.{i}.mlp.experts.up", theirs + "gate_up_proj", Part(1, 2, 1, both)),
            Rule("text.layers.{i}.mlp.experts.down", theirs + "down_proj", Turned(text.hidden_size, width)),
        ]
    elif text.experts is not None:
        numbers = range(text.experts.num_experts)
        for part in ("gate", "up", "down"):
            names = tuple(f"{prefix}layers.{{i}}.mlp.experts.{n}.{part}_proj.weight" for n in numbers)
            rules.append(Rule(f"text.layers.{{i}}.mlp.experts.{part}", names, Stack()))
    return rules


def head_rules(tied: bool, name: str = "lm_head.weight") -> tuple[list[Rule], tuple[str, ...]]:
    """The rule of a head, and what to pass over: some folders store a tied table twice."""
    return ([], (name,)) if tied else ([Rule("head.weight", name)], ())


def copies(twice: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """What is passed over as a copy has to be one: transformers reads such a folder as untied where it is not."""
    return tuple((name, "text.embed.weight") for name in twice)


def text_buffers(prefix: str = "model.") -> tuple[str, ...]:
    """What older folders hold beside weights."""
    return tuple(prefix + name for name in _BUFFERS)


def text_weights(text: TextConfig, tied: bool) -> WeightMap:
    """Of a model that is a text tower and its head."""
    head, twice = head_rules(tied)
    return WeightMap((*text_rules(text), *head), (), (*text_buffers(), *twice), copies=copies(twice))
