"""errors, registry, rng, weight map, device, fake world: small things everyone leans on."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from tessera.config.built_ins import TASK_NAMES
from tessera.config.registry import Maker, Registry
from tessera.core.task import Task
from tessera.errors import TesseraError, nearest_file
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks, fake_world, free_port, port_is_free
from tessera.runtime.rng import derive, generator
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Concat, Reshape, TensorChunk, TransposeIfNeeded
from tests.errors import raises


def test_error_shows_all_it_knows_and_survives_a_process_border() -> None:
    error = TesseraError("no such key", where="a.yaml", allowed=["x", "y"], nearest="x", fix="use x")
    text = str(error)
    assert all(word in text for word in ("no such key", "a.yaml", "x, y", "did you mean: x", "use x"))
    assert str(copy.copy(error)) == text  # copying takes the same road as sending


def test_the_ending_of_a_file_name_makes_no_file_the_nearest() -> None:
    files = ["long.jsonl", "codes.json", "train.json", "train.jsonl"]
    assert [nearest_file(name, files) for name in ("nothere.jsonl", "model.json")] == [None, None]
    assert [nearest_file(name, files) for name in ("tain.jsonl", "train.jsnl", "train.json", "code")] == [
        *("train.jsonl", "train.jsonl", "train.json", "codes.json")
    ]


def test_registry_finds_built_ins_and_import_paths() -> None:
    tasks: Registry[object] = Registry(TASK_NAMES, Maker("task", bases=(Task,)))
    assert "language" in tasks.names()
    assert tasks.get("language") is tasks.get("tessera.tasks.language") is tasks.get("tessera.tasks.language:TASK")
    with pytest.raises(TesseraError) as caught:
        tasks.get("langage")
    assert caught.value.nearest == "language"
    with raises("recipe.no-attribute"):
        tasks.get("tessera.runtime.rng")


def test_random_streams_depend_on_their_purpose_alone() -> None:
    assert derive(1, "init", "a") == derive(1, "init", "a") != derive(1, "init", "b")
    assert derive(1, "23") != derive(12, "3")
    first = torch.rand(3, generator=generator("cpu", 5, "x"))
    torch.rand(10)
    assert torch.equal(first, torch.rand(3, generator=generator("cpu", 5, "x")))


def test_weight_map_goes_both_ways() -> None:
    table = WeightMap(
        (
            Rule("layers.{i}.q", "model.h.{i}.attn.q"),
            Rule("layers.{i}.qkv", ("h.{i}.q", "h.{i}.k"), Concat((4, 2))),
            Rule("patch", "conv", Reshape((4, 12), (4, 3, 2, 2))),
            Rule("out", "o", TransposeIfNeeded(2, 5)),
        ),
        renames=(("old.", "model."),),
        skip=("rotary.{x}.inv",),
    )
    assert table.rule_for("layers.7.q")[1] == ("model.h.7.attn.q",)  # type: ignore[index]
    assert table.rule_for("layers.7.x.q") is None
    assert table.canonical("old.h.1") == "model.h.1"
    assert table.skips("rotary.3.inv")
    assert not table.skips("rotary.inv")
    for name, shape in (("layers.0.qkv", (6, 3)), ("patch", (4, 12)), ("out", (2, 5))):
        ours = torch.rand(shape)
        rule, foreign = table.rule_for(name)  # type: ignore[misc]
        theirs = rule.op.to_foreign(ours)
        assert len(theirs) == len(foreign)
        assert torch.equal(rule.op.to_native(theirs), ours)


def test_two_of_ours_in_one_foreign_tensor() -> None:
    """Experts' gate and up, stacked and turned; whoever stored them as they are is read, too."""
    both = TransposeIfNeeded(8, 3)
    table = WeightMap(
        (
            Rule("{i}.gate", "h.{i}.gate_up", TensorChunk(0, 2, 1, both)),
            Rule("{i}.up", "h.{i}.gate_up", TensorChunk(1, 2, 1, both)),
            Rule("{i}.mlp", "h.{i}.mlp"),
            Rule("{i}.square", "h.{i}.square", TransposeIfNeeded(3, 3)),
        )
    )
    ours = {
        "7.gate": torch.rand(2, 4, 3),
        "7.up": torch.rand(2, 4, 3),
        "7.mlp": torch.rand(2),
        "7.square": torch.rand(3, 3),
    }
    assert table.group_of("7.gate") == table.group_of("7.up") == ("7.gate", "7.up")
    assert table.group_of("7.mlp") == ("7.mlp",)
    theirs = table.to_foreign(dict(reversed(ours.items())))
    assert {name: tuple(t.shape) for name, t in theirs.items()} == {
        "h.7.gate_up": (2, 3, 8),
        "h.7.mlp": (2,),
        "h.7.square": (3, 3),
    }
    assert torch.equal(theirs["h.7.square"], ours["7.square"])
    unturned = {**theirs, "h.7.gate_up": theirs["h.7.gate_up"].transpose(1, 2)}
    for stored in (theirs, unturned):
        for name, tensor in ours.items():
            rule, foreign = table.rule_for(name)  # type: ignore[misc]
            assert torch.equal(rule.op.to_native([stored[f] for f in foreign]), tensor)
    with raises("model.no-weight-rule"):
        table.to_foreign({"x": torch.zeros(1)})


@pytest.mark.parametrize(("there", "error"), [(False, None), (True, None), (True, "Failed to find C compiler")])
def test_kernels_of_our_own_are_for_where_they_can_be_built(
    there: bool, error: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def probe(device: torch.device) -> None:
        if error is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setitem(sys.modules, "tessera.runtime.triton_probe", types.SimpleNamespace(probe=probe))
    devices._builds_kernels.cache_clear()
    with caplog.at_level("WARNING", logger="tessera"):
        assert devices._builds_kernels(torch.device("cpu")) == (there and error is None)
    devices._builds_kernels.cache_clear()
    assert ("apt install gcc" in caplog.text and str(error) in caplog.text) == (error is not None)


def test_devices() -> None:
    assert devices.resolve("cpu").type == "cpu"
    with pytest.raises(TesseraError) as caught:
        devices.resolve("cpi")
    assert caught.value.nearest == "cpu"
    memory = devices.memory(torch.device("cpu"))
    assert 0 < memory.used <= memory.peak <= memory.total
    assert devices.peak_flops(torch.device("cpu")) is None
    words = [word for word, _ in devices._PEAKS]
    assert not [(a, b) for at, a in enumerate(words) for b in words[at + 1 :] if a in b]  # a GB200 is no B200
    assert devices.backend(torch.device("cpu")) == "gloo"


def test_a_fake_world_of_a_thousand_ranks_needs_one_process() -> None:
    with fake_world(1024, rank=77) as world:
        assert (world.rank, world.size, dist.get_world_size()) == (77, 1024, 1024)
        dist.all_reduce(torch.ones(3))
    assert not dist.is_initialized()


def test_ranks_from_the_environment() -> None:
    assert environment_ranks({}) == (0, 1, 0)
    assert environment_ranks({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    with pytest.raises(TesseraError):
        environment_ranks({"RANK": "x"})


def test_free_ports() -> None:
    import socket

    port = free_port()
    assert port_is_free(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not port_is_free(port)


def test_help_answers_at_once_and_without_torch() -> None:
    """Importing torch is what would take seconds."""
    code = "import sys; from tessera.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True)
    assert b"train" in done.stdout
