"""Text decoders alone (Llama, Qwen2, Qwen3 dense and with experts) against transformers, in fp32, and their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from language_cases import VOCAB, experts_of, text
from parity import (
    compare_gradients,
    compare_outputs,
    from_foreign,
    reference_model,
    same_weights,
    saved,
    spread,
    to_foreign,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from vision_language import Case, packed_text

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.models import resolve
from tests.quick import quick

TOLERANCE = 1e-4


SCALED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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
    ("qwen3", text(2, 4, 2, 8, head_dim=8, experts=experts_of(4, 2)), False),
    ("qwen3", text(3, 4, 2, 8, head_dim=8, experts=experts_of(5, 1, norm_topk_prob=False)), True),
    ("qwen3", text(4, 2, 2, 8, head_dim=8, experts=experts_of(3, 3, decoder_sparse_step=2)), False),
    ("qwen3", text(3, 2, 1, 8, head_dim=8, experts=experts_of(6, 2, mlp_only_layers=[1])), False),
    ("qwen3", text(1, 4, 4, 8, head_dim=8, experts=experts_of(8, 4)), True),
    ("qwen3", text(2, 4, 2, 8, head_dim=16, rope_scaling=YARN), False),
    ("qwen2", text(1, 2, 1, 16, rope_scaling={"rope_type": "linear", "factor": 3.0}), True),
    ("llama", text(1, 2, 1, 16, rope_scaling={"rope_type": "dynamic", "factor": 3.0}), True),
]
NAMES = [f"{family}-{number}" for number, (family, _, _) in enumerate(CASES)]


def pair(number: int) -> tuple[Any, Any, transformers.PreTrainedModel, torch.nn.Module]:
    family, fields, tied = CASES[number]
    spec, config = resolve(
        ModelSection(family=family, config={"text": fields, "tie_word_embeddings": tied, "attention": "eager"})
    )
    reference = reference_model(config, number)
    return spec, config, reference, from_foreign(spec, config, saved(reference)).train()


def samples(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (13, 1, 29)]


def pack(texts: list[Tensor], padding: int) -> Batch:
    cases = [Case(one, one, torch.arange(len(one)), None) for one in texts]
    return Batch(*packed_text(cases, padding), seeds=(0,))


@pytest.mark.parametrize("number", quick(range(len(CASES)), 3, 6, 11, 15, 17, 20, 21, 22), ids=NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(number: int) -> None:
    spec, config, reference, model = pair(number)
    texts = samples(number)
    logits = [reference(input_ids=one[None]).logits[0] for one in texts]
    compare_outputs(model, pack(texts, 5), logits, texts, TOLERANCE)
    grads = spread({name: p.grad for name, p in reference.named_parameters() if p.grad is not None})
    compare_gradients(spec, config, model, grads, TOLERANCE)


BOTH_WAYS = (1, 3, 5, 11, 15, 16, 17, 20, 21, 22)


@pytest.mark.parametrize("number", quick(BOTH_WAYS, 3, 5, 11, 17), ids=[NAMES[n] for n in BOTH_WAYS])
def test_folders_go_both_ways(number: int, tmp_path: Path) -> None:
    spec, config, reference, model = pair(number)
    reference.save_pretrained(tmp_path / "theirs")
    family, read = resolve(ModelSection(path=tmp_path / "theirs", config={"attention": "eager"}))
    assert family is spec
    assert read == config
    again = from_foreign(spec, config, load_file(tmp_path / "theirs" / "model.safetensors"))
    same_weights(model, again)

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
        got = model.eval()(batch, logits=True)["logits"][:-1]
        torch.testing.assert_close(got, back.eval()(input_ids=text[None]).logits[0], rtol=1e-4, atol=1e-4)
