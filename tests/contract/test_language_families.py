"""Text towers alone (Llama, Qwen2, Qwen3 dense and with experts) against transformers, in fp32, and their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import compare_gradients, from_foreign, randomize, relative, to_foreign
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera.core.run_config import ModelSection
from tessera.core.types import IGNORE, Batch, Segments
from tessera.models import FAMILIES, resolve
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 1e-4
VOCAB = 80


def text(layers: int, heads: int, kv_heads: int, head: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * head if "head_dim" not in more else 24,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "eos_token_id": 1,
        **more,
    }


SCALED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def experts(count: int, chosen: int, **more: Any) -> dict[str, Any]:
    """Without the balance loss, which transformers adds to the whole and we to each row."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": 12,
        "router_aux_loss_coef": 0.0,
        **more,
    }


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("llama", text(2, 4, 4, 8), False),
    ("llama", text(2, 4, 2, 8, rms_norm_eps=1e-5), True),
    ("llama", text(1, 6, 2, 8, rope_theta=5e5), False),
    ("llama", text(3, 2, 1, 16, rope_scaling=SCALED), True),
    ("llama", text(2, 3, 1, 8, head_dim=8), False),
    ("qwen2", text(2, 4, 2, 8), True),
    ("qwen2", text(3, 4, 4, 12), False),
    ("qwen2", text(2, 6, 1, 8, rope_theta=1e4), False),
    ("qwen2", text(1, 8, 2, 4), True),
    ("qwen2", text(2, 2, 1, 32, rms_norm_eps=1e-5), False),
    ("qwen3", text(2, 4, 2, 8, head_dim=8), True),
    ("qwen3", text(2, 4, 4, 8, head_dim=16), False),
    ("qwen3", text(3, 6, 2, 8, head_dim=4), False),
    ("qwen3", text(1, 2, 1, 8, head_dim=32), True),
    ("qwen3", text(2, 3, 3, 8, head_dim=8, rope_theta=1e4), False),
    ("qwen3", text(2, 4, 2, 8, head_dim=8, experts=experts(4, 2)), False),
    ("qwen3", text(3, 4, 2, 8, head_dim=8, experts=experts(5, 1, norm_topk_prob=False)), True),
    ("qwen3", text(4, 2, 2, 8, head_dim=8, experts=experts(3, 3, decoder_sparse_step=2)), False),
    ("qwen3", text(3, 2, 1, 8, head_dim=8, experts=experts(6, 2, mlp_only_layers=[1])), False),
    ("qwen3", text(1, 4, 4, 8, head_dim=8, experts=experts(8, 4)), True),
]
NAMES = [f"{family}-{number}" for number, (family, _, _) in enumerate(CASES)]


def pair(number: int) -> tuple[Any, Any, transformers.PreTrainedModel, torch.nn.Module]:
    family, fields, tied = CASES[number]
    spec, config = resolve(
        ModelSection(family=family, config={"text": fields, "tie_word_embeddings": tied, "attention": "eager"})
    )
    hf = config.to_hf()  # type: ignore[attr-defined]
    reference = getattr(transformers, hf["architectures"][0])._from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager", dtype=torch.float32
    )
    randomize(reference, number)
    return spec, config, reference.train(), from_foreign(spec, config, saved(reference)).train()


def saved(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Its weights as it would write them: experts one by one."""
    return {name: tensor for name, tensor in spread(dict(model.state_dict())).items() if "inv_freq" not in name}


def spread(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for n, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out |= {f"{stem}{n}.gate_proj.weight": gate, f"{stem}{n}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{n}.down_proj.weight": down for n, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def samples(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (13, 1, 29)]


def pack(texts: list[Tensor], padding: int) -> Batch:
    lengths = [len(one) for one in texts] + [padding]
    tail = torch.zeros(padding, dtype=torch.int64)
    labels = [torch.cat([one[1:], torch.tensor([IGNORE])]) for one in texts]
    return Batch(
        {
            "tokens": torch.cat([*texts, tail]),
            "labels": torch.cat([*labels, torch.full((padding,), IGNORE)]),
            "positions": torch.cat([torch.arange(length) for length in lengths]),
        },
        {"text": Segments.of(lengths)},
        seeds=(0,),
    )


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(number: int) -> None:
    spec, config, reference, model = pair(number)
    texts = samples(number)
    expected, total = [], torch.zeros(())
    for one in texts:
        out = reference(input_ids=one[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(out[:-1], one[1:], reduction="sum")
        expected.append(out)
    total.backward()
    batch = pack(texts, 5)
    out = model(batch, logits=True)
    loss, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], chunk=16)
    loss.backward()
    assert count == sum(len(one) - 1 for one in texts)
    assert relative(out.logits[:-5], torch.cat(expected)) < TOLERANCE
    assert relative(loss, total) < TOLERANCE
    grads = spread({name: p.grad for name, p in reference.named_parameters() if p.grad is not None})
    compare_gradients(spec, config, model, grads, TOLERANCE)


@pytest.mark.parametrize("number", [1, 3, 5, 11, 15, 16, 17], ids=[NAMES[n] for n in (1, 3, 5, 11, 15, 16, 17)])
def test_folders_go_both_ways(number: int, tmp_path: Path) -> None:
    spec, config, reference, model = pair(number)
    reference.save_pretrained(tmp_path / "theirs")
    found, read = resolve(ModelSection(path=tmp_path / "theirs", config={"attention": "eager"}))
    assert found is spec
    assert read == config
    again = from_foreign(spec, config, load_file(tmp_path / "theirs" / "model.safetensors"))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name

    ours = tmp_path / "ours"
    ours.mkdir()
    state = to_foreign(spec, config, dict(model.state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, ours / "model.safetensors")
    (ours / "config.json").write_text(json.dumps(config.to_hf()))
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        ours, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    text = samples(number)[0]
    with torch.no_grad():
        batch = pack([text], 1)
        got = model.eval()(batch, logits=True).logits[:-1]
        torch.testing.assert_close(got, back.eval()(input_ids=text[None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "preset"),
    [(family, preset) for family in ("llama", "qwen2", "qwen3") for preset in FAMILIES.get(family).presets],
)
def test_configurations_survive_the_way_through_transformers(family: str, preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family=family, preset=preset))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))  # type: ignore[attr-defined]
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config
