"""Weights of folders, runs, checkpoints and adapters in every form that a model can be written in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
import yaml
from test_megatron_forms import hub_weights
from typer.testing import CliRunner

import tessera
from tessera.checkpoint.legacy.dcp import read_dcp
from tessera.cli.main import app
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera_compat.shards.files import read_megatron
from tessera_compat.shards.form import MegatronForm
from tessera_compat.shards.layout import MegatronLayout, layout_of_recipe
from tessera_compat.shards.weight_form import FAMILIES
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chats"), samples=8)


def recipe_for(chats: Path, out: Path) -> dict[str, Any]:
    recipe = chat_recipe(chats, out, steps=1)
    recipe["data"]["eval"] = []
    return recipe


@pytest.fixture(scope="module")
def run(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tessera.train(recipe_for(chats, tmp_path_factory.mktemp("run"))).folder


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    return tessera.convert(run, run.parent / "hf", prove="never")


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


# ---------------------------------------------------------------------------------------------- dcp


def test_the_folder_of_a_job_that_keeps_dcp_is_read(folder: Path, tmp_path: Path) -> None:
    inner = tmp_path / "job" / "iter_0000007"
    weights = {f"model.inner.{name}": tensor for name, tensor in hub_weights(folder).items()}
    stock.save(weights | {"optimizer.step": torch.ones(1)}, checkpoint_id=str(inner))
    (tmp_path / "job" / "latest_checkpointed_iteration.txt").write_text("7")
    words = ["--like", str(folder), "--prefix", "model.inner.", "--prove", "never"]
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "job"), str(tmp_path / "back"), *words])
    assert done.exit_code == 0, done.output
    same(hub_weights(tmp_path / "back"), hub_weights(folder))
    with raises("checkpoint.unknown-name-prefix"):
        tessera.convert(tmp_path / "job", tmp_path / "no", like=folder, prefix="mdl")
    (tmp_path / "job" / "latest_checkpointed_iteration.txt").write_text("../..")
    with raises("megatron.latest-iteration"):
        tessera.convert(tmp_path / "job", tmp_path / "no", like=folder)


def test_a_folder_of_nothing_names_all_forms(tmp_path: Path) -> None:
    with raises("weights.no-model-here") as raised:
        tessera.convert(tmp_path, tmp_path / "no", to="dcp")
    for word in ("config.json", "adapter_config.json", "config.yaml", "Megatron-style", ".metadata"):
        assert word in str(raised.value)


# ---------------------------------------------------------------------------------------------- runs


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in read_dcp(folder).items()}


def test_runs_with_adapters_become_the_other_forms(folder: Path, chats: Path, tmp_path: Path) -> None:
    """Each as by two commands: to a Hugging Face folder, and then on. The frozen weights are not in the checkpoint."""
    recipe = recipe_for(chats, tmp_path)
    recipe["model"] = {"path": str(folder), "lora": {"targets": ["text.layers.*.attn.q"], "rank": 2}}
    run = tessera.train(recipe).folder
    tessera.convert(run, tmp_path / "hf", prove="never")
    tessera.convert(run, tmp_path / "adapters", adapters=True)
    expected = hub_weights(tmp_path / "hf")
    changed = {name for name, tensor in hub_weights(folder).items() if not torch.equal(tensor, expected[name])}
    assert changed == {f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2)}
    for number, source in enumerate((run, max((run / "checkpoints").glob("step-*")), tmp_path / "adapters")):
        tessera.convert(source, tmp_path / f"dcp-{number}", to="dcp")
        same(stored(tmp_path / f"dcp-{number}"), expected)
    weights = next(folder.glob("*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with raises("checkpoint.frozen-weights-moved"):
            tessera.convert(run, tmp_path / "no", to="dcp")
    finally:
        weights.write_bytes(data)
    assert not (tmp_path / "no").exists()


def test_a_run_becomes_shards_as_its_recipe_divides_them(run: Path, folder: Path, chats: Path, tmp_path: Path) -> None:
    divided = {"pp": 2, "tp": 2, "layers": {"vision": [2, 0], "text": [1, 1]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe_for(chats, tmp_path) | {"parallel": divided}))
    words = ["convert", str(run), str(tmp_path / "mm"), "--to", "mm", "--recipe", str(tmp_path / "recipe.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ranks = sorted(path.name for path in (tmp_path / "mm/release").iterdir())
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    tessera.convert(tmp_path / "mm", tmp_path / "back", like=folder, prove="never")
    same(hub_weights(tmp_path / "back"), hub_weights(folder))


def test_runs_that_hold_no_plain_weights_are_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    with raises("checkpoint.none-yet"):
        tessera.convert(copy, tmp_path / "no", to="dcp")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["lora"] = {"quantize": "nf4", "targets": ["text.layers.*.attn.q"]}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    with raises("adapter.merge-into-quantized") as raised:
        tessera.convert(copy, tmp_path / "no", to="mm")
    assert "ADAPTERS --adapters, then convert" in str(raised.value)


# ---------------------------------------------------------------------------------------------- layouts of recipes


def recipe_of(folder: Path, **parallel: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(folder)},
        "data": {"train": [{"path": "a.json"}]},
        "train": {"steps": 1, "global_batch": 32, "micro_batch": 1},
        "parallel": parallel,
    }


def form_of(model: ModelSection) -> MegatronForm:
    spec, config = resolve(model)
    return FAMILIES[spec.name](config)


def layout_of(folder: Path, target: Path) -> MegatronLayout:
    return read_megatron(target, form_of(ModelSection(path=folder)))[1]


def test_the_layout_of_a_recipe_is_that_of_its_plan(folder: Path, tmp_path: Path) -> None:
    lists = {"vision": [1, 1, 0, 0], "text": [0, 0, 1, 1]}
    recipe = recipe_of(folder, pp=2, virtual=2, tp=2, layers=lists, shard=4, reshard_after_forward=2)
    tessera.convert(folder, tmp_path / "mm", to="mm", recipe=recipe)
    layout = layout_of(folder, tmp_path / "mm")
    assert (layout.tp, layout.ep) == (2, 1)
    assert layout.layers == {"vit": ((1, 1), (0, 0)), "llm": ((0, 0), (1, 1))}
    recipe["model"] = {"path": "elsewhere/moved"}  # the model to convert is the one that is divided
    model = ModelSection(path=folder)
    assert layout_of_recipe(recipe, model, form_of(model)) == layout


def test_the_layout_of_a_recipe_has_the_experts() -> None:
    model = ModelSection(family="qwen3_vl", preset="quickstart-moe")
    recipe = recipe_of(Path("elsewhere"), ep=2, tp=2, layers=None)
    layout = layout_of_recipe(recipe, model, form_of(model))
    assert (layout.tp, layout.ep, layout.layers) == (2, 2, {})


def test_recipes_that_shards_cannot_follow_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises("layout.schedule-not-for-shards"):
        tessera.convert(folder, tmp_path / "mm", to="mm", recipe=recipe_of(folder, pp=2, schedule="zbv"))
    apart = recipe_of(folder, tp=2, encoders={"vision": {"tp": 1}})
    with raises("layout.tensor-sizes-differ"):
        tessera.convert(folder, tmp_path / "mm", to="mm", recipe=apart)
    with raises("layout.given-twice", "--recipe"):
        tessera.convert(folder, tmp_path / "mm", to="mm", recipe=recipe_of(folder), layout={})
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "dpc"], "dcp"),
        (["--to", "hf", "--recipe", "r.yaml"], "layout.not-for-this-form"),
        (["--to", "mm", "--recipe", "missing.yaml"], "missing.yaml"),
        (["--to", "dcp", "--dtype", "float32"], "output.option-without-effect"),
        (["--to", "mm", "--adapters"], "output.unknown-adapter-form"),
    ],
)
def test_wrong_words_of_convert(folder: Path, tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(TesseraError) as raised:
        CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "no"), *words], catch_exceptions=False)
    assert said in str(raised.value)
    assert not (tmp_path / "no").exists()


# ---------------------------------------------------------------------------------------------- what a newcomer types


def test_options_without_effect_are_refused(folder: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options, where in (
        ({"like": folder}, "--like"),
        ({"prefix": "model."}, "--prefix"),
        ({"to": "dcp", "prove": "always"}, "--prove"),
        ({"to": "mm", "like": tmp_path}, "--like"),
        ({"jobs": 0}, "--jobs"),
    ):
        with pytest.raises(TesseraError) as told:
            tessera.convert(folder, out, **options)
        assert told.value.where == where, options
    with raises("output.too-few-threads"):
        tessera.convert(run, out, jobs=0)
    assert not out.exists()


def test_a_part_of_shards_leads_to_the_whole(folder: Path, tmp_path: Path) -> None:
    tessera.convert(folder, tmp_path / "mm", to="mm")
    rank = tmp_path / "mm/release/mp_rank_00"
    for part in (rank, rank.parent):
        with raises("weights.no-model-here") as told:
            tessera.convert(part, tmp_path / "out", like=folder)
        assert told.value.fix == f"name {tmp_path / 'mm'}"
    with raises("weights.file-of-several") as told:
        tessera.convert(rank / "model_optim_rng.pt", tmp_path / "out", like=folder)
    with raises("weights.no-config-file", "config.json"):
        tessera.compare(tmp_path / "mm")
    with raises("hub.not-reachable", "Nobody/Model-7B"):
        tessera.convert("Nobody/Model-7B", tmp_path / "out")


def test_the_end_says_what_comes_next(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "mm"), "--to", "mm"])
    assert done.stdout == f"wrote {tmp_path / 'mm'}\n"
    assert "read again and compared" in done.stderr
    assert "next: " in done.stderr
