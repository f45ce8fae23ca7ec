"""A bank of adapters: each row of a call gets its own, as if the adapter were merged, and rows without one nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tessera
from tessera.core.batch import Batch
from tessera.engine.adapter_bank import AdapterBank
from tessera.inference.adapters import bank_of
from tessera.inference.loaded import LoadedModel
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.banked import Banked, linear_layers, mixture, text_rows, vision_language
from tests.toys.chat_set import chat_recipe, write_chat_set

LENGTHS = [5, 3, 1, 7, 1]
ROWS = ["a", None, "b", "a", None]


def fresh(banked: Banked) -> Banked:
    return Banked(banked.spec, banked.config, copy.deepcopy(banked.model))


@torch.no_grad()
def logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch, logits=True)["logits"]
    return out


def to_double(batch: Batch) -> Batch:
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in batch.tensors.items()}
    return Batch(tensors, batch.segments)


@pytest.fixture
def text(tmp_path: Path) -> tuple[Banked, dict[str, Path]]:
    """A vision-language model, and adapters of different layers and ranks."""
    banked = fresh(vision_language())
    layers = linear_layers(banked.model, "text.")
    return banked, {
        "a": banked.write(tmp_path / "a", layers, 1, rank=4),
        "b": banked.write(tmp_path / "b", [path for path in layers if "mlp" in path], 2, rank=11),
    }


def check_rows(banked: Banked, batch: Batch, computed: Tensor, folders: dict[str, Path]) -> None:
    """Each row as the model with its adapter merged gives it."""
    exact: dict[str | None, Tensor] = {None: logits(copy.deepcopy(banked.model).double(), to_double(batch))}
    peers: dict[str | None, Tensor] = {None: logits(banked.model, batch)}
    for name, folder in folders.items():
        exact[name] = logits(banked.merged(folder, torch.float64), to_double(batch))
        peers[name] = logits(banked.merged(folder), batch)
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for row, name in enumerate(ROWS):
        part = slice(bounds[row], bounds[row + 1])
        assert_as_close(computed[part], peers[name][part], exact[name][part], what=f"row {row}")
        if name is not None:
            assert float((peers[name][part] - peers[None][part]).abs().max()) > 0.5, "the adapter matters"


def test_each_row_of_a_call_uses_its_own_adapter(text: tuple[Banked, dict[str, Path]]) -> None:
    banked, folders = text
    plain, bank, batch = fresh(banked), banked.bank(), text_rows(banked, LENGTHS, 3)
    before = logits(plain.model, batch)
    assert torch.equal(logits(banked.model, batch), before)
    for name, folder in folders.items():
        bank.load(name, folder)
    assert bank.names == ("a", "b")
    assert torch.equal(logits(banked.model, batch), before), "nothing is selected"
    for fixed in (False, True):
        bank.select(ROWS, LENGTHS, fixed=fixed)
        computed = logits(banked.model, batch)
        check_rows(plain, batch, computed, folders)
        for row in [*range(5, 8), 16]:
            assert torch.equal(computed[row], before[row]), "nothing is added to rows without an adapter"
    bank.select([None] * 5, LENGTHS)
    assert torch.equal(logits(banked.model, batch), before)


def test_an_encoder_is_called_for_the_images_of_one_adapter(tmp_path: Path) -> None:
    banked = fresh(vision_language())
    layers = [*linear_layers(banked.model, "vision.blocks"), *linear_layers(banked.model, "projector")]
    folders = {name: banked.write(tmp_path / name, layers, seed) for seed, name in enumerate("ab")}
    assert banked.spec.example is not None
    images = banked.spec.example(banked.config, 24)
    images.tensors["pixels"] = torch.randn(images["pixels"].shape, generator=torch.Generator().manual_seed(2))
    plain, bank = fresh(banked), banked.bank()
    for name, folder in folders.items():
        bank.load(name, folder)
    (encoded,) = plain.model.encode(images)
    for name in (None, "a", "b"):
        bank.select([name], [1])
        model, exact = plain.model, copy.deepcopy(plain.model).double()
        if name is not None:
            model, exact = plain.merged(folders[name]), plain.merged(folders[name], torch.float64)
        with torch.no_grad():
            ours, peer = banked.model.encode(images)[encoded], model.encode(images)[encoded]
            assert_as_close(ours, peer, exact.encode(to_double(images))[encoded], what=str(name))
        if name is not None:
            assert not torch.allclose(peer, plain.model.encode(images)[encoded], atol=0.1)
    assert all(block.mlp.calls_layers for block in banked.model.vision.blocks), "weights are not read past the adapters"
    bank.select(["a", "b"], [1, 1])
    with pytest.raises(AssertionError, match="one adapter"):
        banked.model.encode(images)


def test_experts_have_adapters_by_token(tmp_path: Path) -> None:
    """Tokens of several requests meet in one expert. Routers that stand between two experts follow rounding."""
    banked = fresh(mixture())
    experts = [f"text.layers.{n}.mlp.experts.{name}" for n in (0, 1) for name in ("gate_up_proj", "down_proj")]
    folders = {
        "a": banked.write(tmp_path / "a", [*experts, "text.layers.0.attn.q"], 1),
        "b": banked.write(tmp_path / "b", experts[:2], 2, rank=3),
    }
    plain, bank, batch = fresh(banked), banked.bank(), text_rows(banked, LENGTHS, 3)
    for name, folder in folders.items():
        bank.load(name, folder)
    bank.select(ROWS, LENGTHS)
    check_rows(plain, batch, logits(banked.model, batch), folders)
    bank.select(["b"], [0])
    peer, exact = (logits(plain.merged(folders["b"], dtype), batch) for dtype in (torch.float32, torch.float64))
    assert_as_close(logits(banked.model, batch), peer, exact)


def test_slots_are_used_again_and_memory_stays_flat(tmp_path: Path) -> None:
    banked = fresh(vision_language())
    plain, layers = fresh(banked), linear_layers(banked.model, "text.layers.1")
    folders = [banked.write(tmp_path / str(n), layers[n % 2 :: 2], n) for n in range(2)]
    bank, batch = banked.bank(slots=2), text_rows(banked, LENGTHS, 3)
    for number, name in enumerate(("first", "second")):
        bank.load(name, folders[number])
        bank.unload(name)
    bank.load("kept", folders[0])
    bank.load("other", folders[1])
    bank.unload("other")
    bank.load("other", folders[0])
    before = storage(bank)
    for cycle in range(10):
        bank.unload("other")
        bank.load("other", folders[(cycle + 1) % 2])
    assert storage(bank) == before
    # The slot was used by adapters of other layers: none of their values is left.
    bank.select(["other"], [0])
    peer, exact = (logits(plain.merged(folders[0], dtype), batch) for dtype in (torch.float32, torch.float64))
    assert_as_close(logits(banked.model, batch), peer, exact)


def storage(bank: AdapterBank) -> tuple[int, dict[str, tuple[int, int]], int]:
    layers = {path: (layer.slots.a.data_ptr(), layer.slots.b.data_ptr()) for path, layer in bank._layers.items()}
    return bank.version, layers, sum(len(module._forward_hooks) for module in bank._modules.values())


def test_addresses_stay_the_same_for_captured_calls(text: tuple[Banked, dict[str, Path]], tmp_path: Path) -> None:
    """What a CUDA graph sees: tables written in place, and a version that says when to capture again."""
    banked, folders = text
    bank = banked.bank()
    bank.load("a", folders["a"])
    version = bank.version
    bank.select([*ROWS[:1], None], [2, 1], fixed=True)
    assert bank.selection is not None
    table = bank.selection.others
    assert table is not None
    bank.select([None, "a"], [2, 1], fixed=True)
    assert bank.selection is not None
    assert bank.selection.others is not None
    assert bank.selection.others.data_ptr() == table.data_ptr()
    assert table.tolist() == [[True] * 8] * 2 + [[False] + [True] * 7]
    assert bank.version == version
    bank.load("b", folders["b"])  # a larger rank, and a second slot
    assert bank.version > version


# ---------------------------------------------------------------------------------------------- files


def test_adapters_of_runs_and_checkpoints_are_loaded(tmp_path: Path) -> None:
    """PiSSA becomes an adapter of twice the rank."""
    recipe = chat_recipe(write_chat_set(tmp_path / "data", samples=8), tmp_path, steps=1)
    recipe["data"]["eval"] = []
    recipe["model"]["lora"] = {"rank": 3, "init": "pissa", "targets": ["text.layers.{*}.attn", "vision.blocks.0.attn"]}
    recipe["checkpoint"] = {"export": True, "prove": "never"}
    recipe["optim"]["lr"] = 0.1
    run = tessera.train(recipe)
    assert run.checkpoint is not None
    trained, _ = tessera.load(run.folder, device="cpu")
    plain = Banked(trained.spec, trained.config, trained.spec.main.build(trained.config).eval())
    names = plain.model.state_dict()
    stored = {name: tensor for name, tensor in trained.module.state_dict().items() if name in names}
    plain.model.load_state_dict(stored)
    served = LoadedModel(fresh(plain).model.requires_grad_(False), plain.spec, plain.config, None)
    bank, batch = plain.bank(), text_rows(plain, LENGTHS, 3)
    for name, folder in (("run", run.folder), ("checkpoint", run.checkpoint), ("export", run.folder / "adapter")):
        bank.load(name, folder)
        bank.select([name], [0])
        torch.testing.assert_close(logits(plain.model, batch), logits(trained.module, batch), rtol=1e-5, atol=1e-5)
    bank.select([None], [0])
    assert not torch.allclose(logits(plain.model, batch), logits(trained.module, batch), atol=1e-2)
    with raises("adapter.model-has-adapters"):
        AdapterBank(trained.module, plain.plan, plain.weight_map).load("run", run.folder)
    with raises("recipe.pattern-matches-nothing", "vision.blocks.0.attn", "the model and family"):
        mixture().bank().load("run", run.folder)
    of_served = bank_of(served)  # no weight of a loaded model is trained
    of_served.load("run", run.folder)
    of_served.select(["run"], [0])
    torch.testing.assert_close(logits(served.module, batch), logits(trained.module, batch), rtol=1e-5, atol=1e-5)


def changed(folder: Path, out: Path, tensors: dict[str, Tensor] | None = None, **config: object) -> Path:
    """Write a copy of a PEFT folder with some tensors and settings changed."""
    out.mkdir()
    settings = json.loads((folder / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    save_file({**load_file(folder / "adapter_model.safetensors"), **(tensors or {})}, out / "adapter_model.safetensors")
    return out


def test_what_does_not_fit_is_refused_and_changes_nothing(text: tuple[Banked, dict[str, Path]], tmp_path: Path) -> None:
    banked, folders = text
    bank, good = banked.bank(slots=2, rank=8), folders["a"]
    stored = load_file(good / "adapter_model.safetensors")
    first = next(iter(stored))
    layer = first.rpartition(".lora_")[0]
    bank.load("good", good)
    before = storage(bank)
    rows = {name.rpartition(".lora_B")[0]: t.shape[0] for name, t in stored.items() if "lora_B" in name}
    norms = {f"{name}.lora_magnitude_vector": torch.ones(count) for name, count in rows.items()}
    other = {f"{layer.replace('layers.0', 'layers.9')}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    embedding = {"base_model.model.model.embed_tokens.weight": banked.model.text.embed.weight.detach()}
    for number, (code, folder) in enumerate(
        {
            "adapter.rank-too-large": folders["b"],
            "adapter.dora-per-request": changed(good, tmp_path / "dora", norms, use_dora=True),
            "adapter.unknown-layers": changed(good, tmp_path / "other", other),
            "adapter.saved-per-request": changed(
                good, tmp_path / "saved", embedding, modules_to_save=["embed_tokens"], ensure_weight_tying=True
            ),
            "adapter.damaged-file": changed(good, tmp_path / "nan", {first: stored[first] * torch.nan}),
            "adapter.shape-mismatch": changed(good, tmp_path / "wide", {first: torch.ones(4, 99)}),
            "adapter.not-here": tmp_path / "nowhere",
            "adapter.name-in-use": good,
        }.items()
    ):
        with raises(code):
            bank.load("good" if code == "adapter.name-in-use" else f"new{number}", folder)
        assert (bank.names, storage(bank)) == (("good",), before)
    bank.load("second", good)
    with raises("adapter.no-slot"):
        bank.load("third", good)
    for call in (lambda: bank.unload("third"), lambda: bank.select(["third"], [1])):
        with raises("adapter.not-loaded", "third"):
            call()


def test_values_too_large_for_the_type_of_the_model_are_refused(text: tuple[Banked, dict[str, Path]]) -> None:
    """In half precision they would be infinite, and zero times infinity would reach the rows of others."""
    banked, folders = text
    half = Banked(banked.spec, banked.config, fresh(banked).model.half())
    file = folders["a"] / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first] * 1e6}, file)
    with raises("adapter.damaged-file"):
        half.bank().load("a", folders["a"])
    banked.bank().load("a", folders["a"])


def test_a_head_has_no_adapter(tmp_path: Path) -> None:
    """It gets the last tokens of rows only, and other parts read its weight."""
    banked = mixture()
    folder = banked.write(tmp_path / "head", ["head"], 1)
    with raises("adapter.unsupported-layer", "head"):
        banked.bank().load("a", folder)
