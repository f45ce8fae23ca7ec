"""Block offload: frozen weights wait on the host, two blocks at most are on the device, and no number changes."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.config.run_config import load_config
from tessera.parallel.activations import CopyStream
from tessera.parallel.apply import parallelize
from tessera.parallel.block_offload import HostBlock
from tessera.parallel.mesh import Mesh
from tessera.runtime import distributed as dist
from tessera.runtime.modules import clean_name
from tessera.training.init_weights import initial_weights
from tessera.training.setup import build_meta_model
from tests.errors import raises
from tests.quick import quick

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"rank": 4, "alpha": 4}


def recipe(**changes: Any) -> dict[str, Any]:
    """Return a recipe of a tiny Wan with adapters, whose blocks are recomputed."""
    return {
        "model": {
            "family": "wan",
            "preset": "quickstart",
            # Products in bf16 take seconds on a CPU without instructions for them.
            "config": {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_length": 8},
            "lora": {**LORA, **changes.pop("lora", {})},
        },
        "data": {"kind": "generation", "length": 16},
        "parallel": {"recompute": ["blocks.{*}"], **changes.pop("parallel", {})},
        "train": {"steps": 1, "device": "cpu", **changes.pop("train", {})},
        "precision": {"weights": "bfloat16", "compute": "bfloat16"} if changes.pop("half", False) else {},
    }


class Watched(CopyStream):
    """Copy as a device would, and count the bytes of copies that live."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.live = self.most = self.copies = 0

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
        copy = host.clone()
        self.copies += 1
        self.live += copy.nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(copy.untyped_storage(), self._gone, copy.nbytes)
        return copy, None

    def _gone(self, size: int) -> None:
        self.live -= size


def run(settings: dict[str, Any], steps: int = 2) -> tuple[list[float], dict[str, Tensor], Watched, Any]:
    """Return losses and gradients of some passes of a model that is filled from the seed."""
    config = load_config(settings)
    setup = build_meta_model(config, 1)
    plan = setup.plan
    with dist.fake_world(1, 0):
        module = parallelize(setup.module, plan, Mesh(plan.layout.axes, CPU), CPU)
        initial_weights(module, config, setup, CPU)()
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or clean_name(name).startswith("head.proj"):  # which begins as zeros
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
    watched = Watched()
    for part in module.modules():
        if isinstance(part, HostBlock):
            part.order.copies = watched
    assert setup.spec.example is not None
    batch = setup.spec.example(setup.config, 16)
    batch.tensors["latents"].copy_(torch.randn(batch["latents"].shape, generator=chance))
    losses = []
    for _ in range(steps):
        loss = module(batch)["latents"].float().square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
    gradients = {clean_name(n): p.grad for n, p in module.named_parameters() if p.grad is not None}
    return losses, gradients, watched, (module, plan)


@functools.cache
def offloaded(quantize: str | None, half: bool) -> tuple[list[float], dict[str, Tensor], Watched, Any]:
    """Return the same with all blocks on the host. Nobody changes it."""
    return run(recipe(lora={"quantize": quantize}, half=half, parallel={"block_offload": True}))


@pytest.mark.parametrize(
    ("quantize", "half"),
    quick([(None, False), (None, True), ("nf4", False), ("nf4", True)], (None, False), ("nf4", True)),
)
def test_losses_and_gradients_are_the_same_bit_for_bit(quantize: str | None, half: bool) -> None:
    plain = run(recipe(lora={"quantize": quantize}, half=half))
    moved = offloaded(quantize, half)
    assert plain[0] == moved[0]
    assert plain[1].keys() == moved[1].keys()
    assert all(torch.equal(plain[1][name], moved[1][name]) for name in plain[1])
    assert any(gradient.any() for gradient in moved[1].values())
    assert plain[2].copies == 0


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_two_blocks_at_most_are_on_the_device_and_the_plan_says_how_large_they_are(quantize: str | None) -> None:
    _, _, watched, (module, plan) = offloaded(quantize, True)
    memory = plan.memory.heaviest
    blocks = [part for part in module.modules() if isinstance(part, HostBlock)]
    sizes = [sum(getattr(owner, name).nbytes for owner, name in block.owners) for block in blocks]
    assert sum(sizes) == memory.host
    assert memory.window == 2 * max(sizes)
    assert watched.most <= memory.window
    assert watched.most > max(sizes)  # the next block came while one computed
    # Backward of the first pass and the second forward each fetch what they need once.
    assert watched.copies % sum(len(block.owners) for block in blocks) == 0
    tensors = {clean_name(n): t for n, t in [*module.named_parameters(), *module.named_buffers()]}
    waiting = sum(t.nbytes for block in blocks for t in (getattr(o, n) for o, n in block.owners))
    assert memory.parameters + memory.buffers == sum(t.nbytes for t in tensors.values()) - waiting
    assert "in host memory, at most" in plan.describe()


def test_evaluation_and_a_pass_without_gradient_fetch_weights_too() -> None:
    _, _, watched, (module, _) = run(recipe(parallel={"block_offload": ["blocks.{1-3}"]}), steps=1)
    before = watched.copies
    config = load_config(recipe())
    setup = build_meta_model(config, 1)
    assert setup.spec.example is not None
    with torch.no_grad():
        first = module(setup.spec.example(setup.config, 16))["latents"]
        assert torch.equal(first, module(setup.spec.example(setup.config, 16))["latents"])
    assert watched.copies > before


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"parallel": {"recompute": []}}, "layout.offload-without-recompute"),
        ({"parallel": {"compile": True}}, "layout.block-offload-conflict parallel.compile"),
        ({"parallel": {"offload": True}}, "layout.block-offload-conflict"),
        ({"parallel": {"block_offload": ["blockz.{*}"]}}, "recipe.pattern-matches-nothing"),
        ({"train": {"device": "cuda"}}, "layout.no-frozen-weights"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], error: str) -> None:
    settings = recipe(parallel={"block_offload": True, **changes.get("parallel", {})}, train=changes.get("train", {}))
    with raises(error):
        build_meta_model(load_config(settings), 1)


def test_a_model_without_frozen_blocks_has_nothing_to_move() -> None:
    settings = recipe(parallel={"block_offload": True})
    del settings["model"]["lora"]
    with raises("layout.no-frozen-weights"):
        build_meta_model(load_config(settings), 1)


def test_a_module_that_is_never_called_keeps_its_weights_on_the_host() -> None:
    """Checkpoints and exports read the weights where they wait."""
    _, _, _, (module, _) = offloaded(None, True)
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight is not None:
            assert torch.isfinite(part.weight.float()).all()
