"""Positions without a label cost nothing, and change nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tessera.config.run_config import load_config
from tessera.core.batch import EMBEDDING_NOISE, IGNORE, Batch, Segments
from tessera.core.outputs import LOGITS, Projection
from tessera.models.processing.conversation import trained_positions
from tessera.tasks.answers import answer_log_probs
from tessera.tasks.language import LanguageTask, embedding_noise
from tessera.training.setup import build_meta_model
from tests.errors import raises
from tests.task_parts import sum_and_count


def example(share: float) -> tuple[Batch, Tensor, nn.Linear]:
    torch.manual_seed(0)
    labels = torch.randint(0, 50, (40,)).where(torch.rand(40) < share, IGNORE)
    batch = Batch({"tokens": torch.zeros(40, dtype=torch.int64), "labels": labels}, {"text": Segments.of([40])})
    return batch, torch.randn(40, 8, requires_grad=True), nn.Linear(8, 50, bias=False)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_of_trained_positions_is_the_loss(share: float) -> None:
    batch, hidden, head = example(share)
    results = []
    for variant in (batch, batch.with_tensors(trained=trained_positions(batch["labels"]))):
        total, count = sum_and_count(LanguageTask(), {LOGITS: Projection(hidden, head)}, variant)
        results.append((total, count, *torch.autograd.grad(total, (hidden, head.weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_so_it_is_for_pairs_of_answers() -> None:
    batch, hidden, head = example(0.5)
    pair = torch.cat([torch.full((5,), -1), torch.arange(4).repeat_interleave(8), torch.full((3,), -1)])
    batch = batch.with_tensors(pair=pair, pair_ids=torch.arange(2))
    results = []
    for variant in (batch, batch.with_tensors(trained=trained_positions(batch["labels"]))):
        logs = answer_log_probs({LOGITS: Projection(hidden, head)}, variant)
        results.append((logs, *torch.autograd.grad((logs * torch.arange(4)).sum(), (hidden, head.weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- noise on embeddings


def packed(lengths: tuple[int, ...], seeds: tuple[int, ...], **tensors: torch.Tensor) -> Batch:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return Batch({"tokens": tokens, **tensors}, {"text": Segments(bounds, max(lengths), lengths)}, seeds=seeds)


def test_noise_on_embeddings_is_scaled_by_the_length_of_each_packed_sample() -> None:
    lengths, width, alpha = (4, 60, 50, 14), 256, 5.0
    noise = embedding_noise(packed(lengths, (1, 2)), alpha, width)
    assert noise.shape == (128, width)
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        bound = alpha / (length * width) ** 0.5
        assert 0.99 * bound < float(part.abs().max()) <= bound
        # The mean of so many uniform numbers is within five of its own standard deviations of 0.
        assert abs(float(part.mean())) < 5 * bound / (3 * part.numel()) ** 0.5


def test_noise_depends_on_the_row_alone_and_ranks_that_share_it_take_their_part() -> None:
    whole = embedding_noise(packed((8, 8), (1, 2)), 5.0, 16)
    assert torch.equal(whole[8:], embedding_noise(packed((8,), (2,)), 5.0, 16))
    index = torch.tensor([15, 3, 9])
    shared = packed((8, 8), (1, 2), token_index=index)
    assert torch.equal(embedding_noise(shared, 5.0, 16), whole[index])
    assert not torch.equal(whole[:8], embedding_noise(packed((8,), (3,)), 5.0, 16))


def test_training_reads_the_noise_and_evaluation_does_not() -> None:
    config = load_config(
        {"model": {"family": "qwen3", "preset": "quickstart"}, "train": {"steps": 1}},
        {"train.task_options": {"neftune_alpha": 20.0}},
    )
    setup = build_meta_model(config, 1)
    torch.manual_seed(0)
    module = setup.spec.main.build(setup.config)
    batch = packed((6, 10), (7,), positions=torch.cat([torch.arange(6), torch.arange(10)]))
    noisy = setup.task.inputs(batch)
    assert noisy[EMBEDDING_NOISE].shape == (16, module.text.embed.embedding_dim)
    with torch.no_grad():
        assert not torch.equal(module.train()(noisy)["logits"].hidden, module(batch)["logits"].hidden)
        assert torch.equal(module.eval()(noisy)["logits"].hidden, module(batch)["logits"].hidden)


def test_a_model_that_reads_no_noise_is_told() -> None:
    with raises("task.no-embedding-noise"):
        LanguageTask(neftune_alpha=5.0).check(None, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
