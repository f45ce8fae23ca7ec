"""Names that no wrapper changes, and optimizer state that can be loaded in place without having stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import (
    model_tensors,
    optimizer_tensors,
    tied_names,
    training_tensors,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("made", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


NAMES = ["body.0.bias", "body.0.weight", "body.1.bias", "body.1.weight", "embed.weight", "kept"]


def test_names_are_free_of_wrappers() -> None:
    plain = Tied()
    assert sorted(model_tensors(plain)) == NAMES
    wrapped = Tied()
    wrapped.body[0] = checkpoint_wrapper(wrapped.body[0])
    wrapped.body[1] = torch.compile(wrapped.body[1])  # type: ignore[assignment]
    assert sorted(model_tensors(wrapped)) == NAMES
    assert model_tensors(wrapped)["embed.weight"] is wrapped.embed.weight
    assert tied_names(wrapped) == {"head.weight": "embed.weight"}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = (torch.arange(4) + number) % 5
    nn.functional.cross_entropy(net(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


KINDS: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False}, {"amsgrad": True}]


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_resumes_bitwise(tmp_path: Path, kind: dict[str, Any]) -> None:
    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1, **kind)
    for number in range(3):
        step(net, optimizer, number)
    CheckpointManager(tmp_path, 1).save(3, training_tensors(net, optimizer), {}, "")
    for number in range(3, 6):
        step(net, optimizer, number)

    again = Tied()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(9)
    its = torch.optim.AdamW(again.parameters(), lr=0.05, weight_decay=0.1, **kind)
    assert CheckpointManager(tmp_path, 1).resume(training_tensors(again, its)) is not None
    for number in range(3, 6):
        step(again, its, number)
    first, right = training_tensors(net, optimizer), training_tensors(again, its)
    assert first.keys() == right.keys()
    assert all(torch.equal(first[name], right[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_creating_state_changes_nothing(kind: dict[str, Any]) -> None:
    net, untouched = Tied(), Tied()
    with torch.no_grad():
        for parameter in [*net.body.parameters(), *untouched.body.parameters()]:
            parameter.view(-1)[:2] = -0.0
    net.body[0].bias.requires_grad_(False)
    untouched.body[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1, **kind)
    other = torch.optim.AdamW(untouched.parameters(), lr=0.05, weight_decay=0.1, **kind)
    net.embed.weight.grad = torch.ones_like(net.embed.weight)
    names = {tensor: name for name, tensor in model_tensors(net).items()}
    tensors = optimizer_tensors(optimizer, names)
    assert "optim.embed.weight.exp_avg" in tensors
    assert not any("body.0.bias" in name for name in tensors), "what is not trained has no state"
    assert all(not tensor.any() for tensor in tensors.values())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert net.embed.weight.grad is not None
    net.embed.weight.grad = None
    for trained, two in zip(net.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(trained.view(torch.int32), two.view(torch.int32)), "bit for bit, the sign of zero too"
    for number in range(2):
        step(net, optimizer, number)
        step(untouched, other, number)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), untouched.parameters(), strict=True))
