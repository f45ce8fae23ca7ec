"""Positions in classes of transformers: rotary frequencies that follow the length of a sample."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.models.transformers import TransformersBuilder, TransformersConfig
from tessera.models.transformers.generation import continue_prompts
from tessera.tasks.transformers import TransformersTask
from tests.close import assert_as_close
from tests.task_parts import sum_and_count

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
THRESHOLD = 16  # tokens up to which frequencies are the original ones
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        {
            "max_position_embeddings": 4 * THRESHOLD,
            "original_max_position_embeddings": THRESHOLD,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE},
        },
    ),
    "dynamic": (
        "Llama",
        {
            "max_position_embeddings": THRESHOLD,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
}
LENGTHS = (30, 9, 40, 14)  # on both sides of the threshold, and a long one first


@cache
def stock(name: str) -> Any:
    kind, fields = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **HEADS, **copy.deepcopy(fields))
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa")


def ours(model: Any, attention: Literal["sdpa", "eager"] = "sdpa") -> Any:
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    module = TransformersBuilder(TransformersConfig(hf=described, attention=attention)).build()
    module.load_state_dict(model.state_dict(), assign=True)
    return module


def samples() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=chance) for length in LENGTHS]


def padded(tokens: list[Tensor]) -> Batch:
    """Pad to a multiple of 8 that is beyond the threshold for every sample."""
    width = -(-max(24, *map(len, tokens)) // 8) * 8
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in tokens])
    mask = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in tokens])
    return Batch({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, IGNORE)})


def packed(tokens: list[Tensor]) -> Batch:
    """Join samples in one row, as a processor joins them."""
    labels = [torch.cat([torch.tensor([IGNORE]), row[1:]]) for row in tokens]
    positions = [torch.arange(len(row)) for row in tokens]
    tensors = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return Batch({key: torch.cat(rows)[None] for key, rows in tensors.items()})


def alone_in_the_library(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return loss and gradients of the class itself, which sees one sample and has seen none before."""
    total: dict[str, Tensor] = {}
    for row in samples():
        model = copy.deepcopy(stock(name)).to(dtype)
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, row[1:], reduction="sum")
        loss.backward()
        parts = {"loss": loss.detach(), **{path: p.grad for path, p in model.named_parameters()}}
        total = {path: part + total.get(path, 0) for path, part in parts.items()}
    return total


def in_batches(module: Any, batches: list[Batch]) -> dict[str, Tensor]:
    task, losses = TransformersTask(), []
    module.zero_grad()
    for batch in batches:
        inputs = task.inputs(batch)
        loss, _ = sum_and_count(task, module(inputs), inputs)
        loss.backward()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses).sum(), **{path: p.grad.clone() for path, p in module.named_parameters()}}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_a_sample_do_not_depend_on_its_neighbours(name: str) -> None:
    exact, peer = (alone_in_the_library(name, dtype) for dtype in (torch.float64, torch.float32))
    module, rows = ours(stock(name)), samples()
    batches = {
        "alone": [padded([row]) for row in rows],
        "all": [padded(rows)],
        "micro-batches": [padded(rows[:1]), padded(rows[1:])],
        "packed": [packed(rows)] if name == "dynamic" else [packed([row]) for row in rows],
    }
    for way, split in batches.items():
        for path, value in in_batches(module, split).items():
            assert_as_close(value, peer[path], exact[path], what=f"{way}: {path}")


@pytest.mark.parametrize("name", CASES)
def test_no_earlier_length_is_remembered(name: str) -> None:
    """So a resumed run, which has not seen the batches before it, goes on as the first one would have."""
    module, rows = ours(stock(name)), samples()
    short = padded([rows[1]])
    before = in_batches(module, [short])
    in_batches(module, [padded([rows[2]])])
    between = padded([rows[0]])  # longer than the threshold, shorter than the longest so far
    after_long, fresh = in_batches(module, [between]), in_batches(ours(stock(name)), [between])
    assert all(torch.equal(after_long[path], fresh[path]) for path in fresh)
    assert all(torch.equal(value, before[path]) for path, value in in_batches(module, [short]).items())


@pytest.mark.parametrize("name", CASES)
def test_an_answer_does_not_depend_on_the_prompts_beside_it(name: str) -> None:
    module, prompts = ours(stock(name)).double().eval(), samples()[:2]
    width = max(map(len, prompts))
    rows = [F.pad(row, (width - len(row), 0)) for row in prompts]
    together = Batch({"input_ids": torch.stack(rows), "attention_mask": torch.stack([row != 0 for row in rows]).long()})
    alone = [Batch({"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]}) for row in prompts]
    logits, expected = next_logits(module, together), torch.cat([next_logits(module, prompt) for prompt in alone])
    limit = (
        1e4 * torch.finfo(torch.float64).eps
    )  # sums of thousands of terms; the other prompt's factors move 2e-4 of it
    assert (logits - expected).norm() <= limit * expected.norm()


def next_logits(module: Any, batch: Batch, count: int = 4) -> Tensor:
    """Return the logits of the tokens that follow prompts: [prompts, tokens, vocabulary]."""
    steps: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        steps.append(logits.clone())
        return logits.argmax(-1)

    answers = continue_prompts(module, batch, max_new_tokens=count, stop_tokens=(), choose=choose)
    assert all(len(tokens) == len(steps) for tokens in answers)
    return torch.stack(steps, 1)
