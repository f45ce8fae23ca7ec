"""Jobs of MindSpeed-MM: translated and planned at their real sizes, refused where they must be, run at tiny sizes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from job_cases import (
    EXAMPLES,
    JOBS,
    SCRIPTS,
    is_job,
    script_of,
    tiny_data_json,
    tiny_model_json,
    tiny_yaml,
    training_scripts,
    write_jobs,
    write_mllm_data,
    write_published_configs,
)
from safetensors.torch import load_file
from small_folders import small_folder
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.reader import dump_yaml
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
from tessera.runtime.distributed import free_port
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.config_files import read_job_yaml
from tessera_compat.mindspeed_mm.continued import changes_of_job
from tessera_compat.mindspeed_mm.convert import run as mm_convert
from tessera_compat.mindspeed_mm.entry_points import evaluate, inference, pretrain
from tessera_compat.mindspeed_mm.evaluation_json import LONGEST_CELL, write_sheet
from tessera_compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera_compat.mindspeed_mm.inference_json import read_inference
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.job_words import in_words_of_job
from tessera_compat.mindspeed_mm.migrate import MigratedJob, lay_out, migrate
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.run import run_script as run_entry_file
from tests.acceptance import flags_page
from tests.errors import raises

ROOT = Path(__file__).parents[2]
# Job files at tiny size -> how many ranks they are for.
TINY_JOBS = {
    name: 1 if name == "packed.sh" else 2
    for name in sorted([*SCRIPTS, *(path.name for path in JOBS.glob("*") if is_job(path))])
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the configuration of every published model."""
    root = tmp_path_factory.mktemp("published")
    lay_out(root)
    write_published_configs(root)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with data in the seed's folders."""
    root = tmp_path_factory.mktemp("tiny")
    lay_out(root)
    write_mllm_data(root)
    write_jobs(root / "jobs")
    small_folder("qwen2_vl", root / "ckpt" / "tiny")
    return root


@pytest.fixture
def here(published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(published)
    return published


def check_mapped(job: MigratedJob) -> None:
    """What the report calls mapped is in the recipe, where it names one key."""
    for entry in job.report.entries:
        keys = re.findall(r"\b(?:model|data|train|optim|parallel)(?:\.\w+)+", entry.note)
        if entry.outcome == "mapped" and len(keys) == 1 and not keys[0].endswith(".json"):
            at: Any = job.recipe
            for part in keys[0].split("."):
                assert isinstance(at, list) or part in at, entry.line()
                at = at if isinstance(at, list) else at[part]
    assert {entry.outcome for entry in job.report.entries if entry.source == "behaviour"} == {"differs"}


@pytest.mark.parametrize("script", training_scripts(), ids=str)
def test_every_example_is_translated(script: Path, here: Path) -> None:
    job = migrate(Path("examples") / script)
    assert job.report.refused == []
    check_mapped(job)
    assert job.world_size == 8


QUICK = ("cogvideox", "internvl3", "qwen2.5omni", "wan2.2")
FIRST_OF_MODEL = {script.parts[0]: script for script in training_scripts()[::-1] if script.parts[0] in QUICK}.values()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[] if script in FIRST_OF_MODEL else [pytest.mark.slow], id=str(script))
        for script in training_scripts()
    ],
)
def test_every_example_is_planned(script: Path, here: Path) -> None:
    job = migrate(Path("examples") / script)
    plan = tessera.plan(job.recipe, world=8)
    assert f"pp={job.recipe['parallel'].get('pp', 1)}" in plan.describe() or job.recipe["parallel"].get("pp", 1) == 1


@pytest.mark.parametrize("name", TINY_JOBS)
def test_every_tiny_job_is_translated_and_planned(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    job = migrate(Path("jobs") / name, world_size=TINY_JOBS[name] if name.endswith("yaml") else None)
    assert job.report.refused == []
    assert job.world_size == TINY_JOBS[name]
    assert tessera.plan(job.recipe, world=job.world_size).describe()


def test_there_are_twenty_jobs_of_all_four_generations() -> None:
    texts = [(EXAMPLES / script).read_text() for script in training_scripts()]
    texts += [script_of(name) if name in SCRIPTS else (JOBS / name).read_text() for name in TINY_JOBS]
    assert len(texts) >= 20
    by_yaml = [text for text in texts if "gpt_args:" in text or "pretrain_transformers.py \\\n    $CONFIG" in text]
    trainer = [text for text in texts if "fsdp/train/trainer.py" in text or "training:" in text]
    fsdp2 = [text for text in texts if "--use-torch-fsdp2" in text]
    assert min(len(by_yaml), len(trainer), len(fsdp2)) >= 2
    assert len(texts) - len(by_yaml) - len(trainer) - len(fsdp2) >= 8


def test_the_report_says_who_decides_a_size(here: Path) -> None:
    def line(key: str, *more: str) -> str:
        return next(entry.line() for entry in job_of(MODEL, DATA, *more)[1].entries if entry.key == key)

    size, load = "text_decoder.hidden_size", ("--load", "ckpt/hf_path/Qwen2-VL-7B-Instruct")
    assert line(size) == f"mapped        {size} = 3584: model.config.text.hidden_size"
    assert line(size, *load) == f"not needed    {size} = 3584: the folder of the weights decides text.hidden_size"
    assert line("--eval-interval", "--eval-interval", "5").startswith("not needed    --eval-interval = 5: ")
    frozen, lora = "image_encoder.vision_encoder.freeze", ("--lora-target-modules", "linear_qkv", *load)
    assert line(frozen).endswith("model.freeze=['vision']")
    assert line(frozen, *lora).endswith("with adapters everything else is frozen")


def test_the_start_of_a_recipe_keeps_variables_that_have_no_key(here: Path, tmp_path: Path) -> None:
    script = Path("examples/qwen2vl/finetune_qwen2vl_7b.sh").read_text()
    changed = tmp_path / "job.sh"
    changed.write_text(script.replace("TASK_QUEUE_ENABLE=2", "CPU_AFFINITY_CONF='1,npu0:0-1'\npython prepare.py", 1))
    job = migrate(changed)
    assert job.start(Path("a.yaml")) == "CPU_AFFINITY_CONF=1,npu0:0-1 tessera train a.yaml --nproc 8"
    assert "  not needed    line 7 = 'prepare.py': does not train: start it separately" in job.report.lines()
    changed.write_text(f"{script}\n{script}")
    with raises("job.several-jobs"):
        migrate(changed)


def test_the_recipe_says_what_the_script_says(here: Path) -> None:
    recipe = migrate(Path("examples/qwen2vl/finetune_qwen2vl_7b.sh")).recipe
    assert recipe["parallel"] == {
        "backend": "megatron",
        "pp": 4,
        "layers": {"vision": [32, 0, 0, 0], "text": [1, 10, 10, 7]},
        "timeout_s": 1200,
    }
    assert recipe["model"] == {
        "path": "ckpt/hf_path/Qwen2-VL-7B-Instruct",
        "freeze": ["vision", "projector"],
    }
    assert recipe["train"] == {"steps": 10000, "global_batch": 192, "micro_batch": 1, "seed": 42}
    assert recipe["optim"]["schedule"] == {"kind": "cosine", "warmup": 1000}
    assert recipe["optim"]["betas"] == [0.9, 0.999]
    assert recipe["precision"] == {"weights": "float32", "compute": "bfloat16"}
    assert recipe["data"]["length"] == 1024
    assert recipe["data"]["train"][0]["path"] == "./data/mllm_format_llava_instruct_data.json"
    lora = migrate(Path("examples/qwen2vl/finetune_qwen2vl_7b_lora.sh")).recipe["model"]["lora"]
    assert (lora["rank"], lora["alpha"]) == (8, 16)
    assert "text.layers.{*}.attn.{q,k,v}" in lora["targets"]
    dpo = migrate(Path("examples/qwen2vl/posttrain_qwen2vl_7b_dpo.sh")).recipe
    assert (dpo["data"]["kind"], dpo["train"]["task"]) == ("preference", "dpo")
    r4 = migrate(Path("examples/qwen3vl/finetune_qwen3vl_8b_v1.sh")).recipe
    assert r4["model"]["freeze"] == ["vision", "projector"]
    assert (r4["train"]["global_batch"], r4["optim"]["eps"], r4["data"]["length"]) == (8, 1e-8, 1024)
    assert r4["parallel"]["recompute"] == ["model.language_model.layers.{*}"]


def test_sizes_are_found_without_a_folder(here: Path) -> None:
    """Without --load the model begins from random weights, and model.json describes it."""
    words = (
        "--lr 1e-4 --train-iters 2 --mm-model examples/qwen2vl/model_7b.json --mm-data examples/qwen2vl/data_7b.json"
    )
    sizes = "--pipeline-model-parallel-size 4 --vocab-size 152064 --num-layers 28"
    args = parse_args([*words.split(), *sizes.split()], world_size=4)
    model = recipe_of(args)[0]["model"]
    assert model["family"] == "qwen2_vl"
    assert model["config"]["text"]["num_key_value_heads"] == 4
    assert model["config"]["vision"] == {
        **{"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "in_channels": 3, "patch_size": 14},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    assert model["tokenizer"] == "./ckpt/hf_path/Qwen2-VL-7B-Instruct"


def edited(path: str, change: Callable[[dict[str, Any]], object]) -> str:
    """Return the name of a JSON file that differs from an example."""
    data = json.loads(Path(path).read_text())
    change(data)
    target = Path(path).with_name("edited.json")
    target.write_text(json.dumps(data))
    return str(target)


MODEL, DATA = "examples/qwen2vl/model_7b.json", "examples/qwen2vl/data_7b.json"
PIPELINE = ["--pipeline-model-parallel-size", "4"]


def job_of(model: str = MODEL, data: str = DATA, *more: str) -> tuple[dict[str, Any], JobReport]:
    words = ["--lr", "1e-5", "--train-iters", "9", "--mm-model", model, "--mm-data", data, *PIPELINE, *more]
    return recipe_of(parse_args(words, world_size=4, allow_refused=True))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--lora-r", "4"], "job.adapter-flags --lora-target-modules"),
        (["--lora-target-modules", "linear_qk"], "job.adapter-layer linear_qkv"),
        (["--dpo-beta", "0.2"], "job.pairs-missing"),
        (["--lr-decay-iters", "5"], "job.decay-steps --lr-decay-iters"),
        (["--optimizer", "sgd"], "job.flag-value"),
        (["--lr-scale-modules", "nowhere", "--lr-mult", "2"], "job.unknown-module"),
    ],
)
def test_contradictions_between_files_and_flags_are_refused(more: list[str], error: str, here: Path) -> None:
    with raises(error):
        job_of(MODEL, DATA, *more)


def test_shards_are_read_beside_the_folder_that_says_which_model_they_are_of(here: Path) -> None:
    Path("ckpt/mm/release/mp_rank_00").mkdir(parents=True, exist_ok=True)
    model = job_of(MODEL, DATA, "--load", "ckpt/mm")[0]["model"]
    assert (model["path"], model["weights"]) == ("./ckpt/hf_path/Qwen2-VL-7B-Instruct", "ckpt/mm")
    other = edited(DATA, lambda data: _processor(data, "nowhere"))
    with raises("job.shards-without-model"):
        job_of(MODEL, other, "--load", "ckpt/mm")


def _processor(data: dict[str, Any], folder: str) -> None:
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = folder


def test_keys_of_json_files_are_checked(here: Path) -> None:
    def refused(model: str = MODEL, data: str = DATA) -> list[str]:
        return [f"{entry.key}: {entry.note}" for entry in job_of(model, data)[1].refused]

    assert refused() == []
    unknown = edited(MODEL, lambda data: data["text_decoder"].update(num_layer=3))
    assert refused(unknown) == ["text_decoder.num_layer: unknown key; did you mean num_layers?"]
    other = edited(MODEL, lambda data: data["text_decoder"].update(activation_func="gelu", n_shared_experts=2))
    assert [line.partition(":")[0] for line in refused(other)] == [
        "text_decoder.activation_func",
        "text_decoder.n_shared_experts",
    ]
    template = edited(DATA, lambda data: data["dataset_param"]["basic_parameters"].update(template="qwen3_vl"))
    assert "template" in refused(data=template)[0]
    key = edited(DATA, lambda data: data["dataset_param"]["attr"].update(image="images"))
    assert refused(data=key) == ["dataset_param.attr.image: unknown key; did you mean images?"]
    for change, said in (
        (lambda data: data["text_decoder"].update(pipeline_num_layers=[1, 10, 10, 8]), "job.layer-counts 29"),
        (lambda data: data["text_decoder"].update(pipeline_num_layers=[14, 14]), "job.layer-counts"),
        (
            lambda data: data["image_encoder"]["vision_encoder"].update(model_id="qwen2vi"),
            "job.vision-encoder qwen2vit",
        ),
        (lambda data: data.update(predictor={}), "job.predictor-missing"),
    ):
        with raises(said):
            job_of(edited(MODEL, change))
    with raises("job.data-pairs"):
        job_of(MODEL, edited(DATA, lambda data: data["dataset_param"]["attr"].update(ranking=True)))
    with raises("job.data-type"):
        job_of(MODEL, edited(DATA, lambda data: data["dataset_param"].update(dataset_type="huggingfac")))


@pytest.mark.parametrize("wrong", [5, [1], "x"])
def test_a_section_that_is_none_is_named(here: Path, wrong: Any) -> None:
    """Before anything starts, and without a traceback."""

    def put(*path: str) -> Callable[[dict[str, Any]], object]:
        def change(data: dict[str, Any]) -> None:
            for part in path[:-1]:
                data = data[part]
            data[path[-1]] = wrong

        return change

    encoder, param = "image_encoder", "dataset_param"
    for path in ((encoder,), (encoder, "vision_encoder"), ("text_decoder",), ("patch",), ("loss_cfg",)):
        with raises("job.section-type", str(path[-1])):
            job_of(edited(MODEL, put(*path)))
    for path in ((param, "basic_parameters"), (param, "attr"), ("dataloader_param",)):
        with raises("job.section-type", str(path[-1])):
            job_of(MODEL, edited(DATA, put(*path)))
    for path in (("profile",), ("memory_profile",)):
        with raises("job.section-type", str(path[-1])):
            job_of(MODEL, DATA, "--mm-tool", edited("mindspeed_mm/tools/tools.json", put(*path)))
    with raises("job.layer-counts"):
        job_of(edited(MODEL, put("text_decoder", "pipeline_num_layers")))
    with raises("job.width-not-multiple", "hidden_size"):
        job_of(edited(MODEL, put(encoder, "vision_encoder", "ffn_hidden_size")))


def test_model_json_is_compared_with_the_folder(here: Path) -> None:
    other = edited(MODEL, lambda data: data["text_decoder"].update(ffn_hidden_size=1024))
    with raises("job.model-size-differs", "text.intermediate_size", "1024", "model.json", "18944"):
        job_of(other, DATA, "--load", "ckpt/hf_path/Qwen2-VL-7B-Instruct")


def test_recompute_and_context_parallel_flags(here: Path) -> None:
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    parallel = job_of(MODEL, DATA, *block.split(), "--swap-attention", "--recompute-norm")[0]["parallel"]
    assert parallel["recompute"] == [
        *("text.layers.0", "text.layers.{1-2}", "text.layers.{11-12}", "text.layers.{21-22}"),
    ]
    assert parallel["activation_offload"] == ["text.layers.{3-10,13-20,23-27}.attn"]
    both = job_of(
        MODEL, DATA, "--recompute-norm", "--recompute-norm-num-layers", "4", "--recompute-activation-function"
    )
    assert both[0]["parallel"]["recompute"] == [
        {"modules": "text.layers.{0-3}", "keep": "matmul"},
        {"modules": "text.layers.{4-27}.mlp", "keep": "matmul"},
    ]
    words = ["--lr", "1", "--train-iters", "1", "--mm-model", "examples/qwen2vl/model_7b_dpo.json", "--mm-data", DATA]
    ring = "--context-parallel-size 4 --context-parallel-algo megatron_cp_algo"
    assert recipe_of(parse_args([*words, *ring.split()], world_size=4))[0]["parallel"]["ulysses"] == 1


@pytest.mark.slow
def test_all_flags_that_save_memory_go_together(here: Path) -> None:
    """Seed 001 lists the three; a plan refuses parts that lie inside each other."""
    flags = ("--recompute-norm", "--recompute-activation-function", "--swap-attention")
    for count in (2, 3):
        for chosen in itertools.combinations(flags, count):
            recipe, report = job_of(MODEL, DATA, *chosen)
            assert tessera.plan(recipe, world=4).describe()
            outcomes = {entry.key: entry.outcome for entry in report.entries}
            assert [outcomes[flag] for flag in chosen].count("not needed") == ("--recompute-norm" in chosen)


def test_one_stage_has_all_layers_whatever_the_lists_say(here: Path) -> None:
    model = edited(MODEL, lambda data: data["text_decoder"].update(pipeline_num_layers=[1, 2]))
    words = ["--lr", "1", "--train-iters", "1", "--mm-model", model, "--mm-data", DATA]
    recipe, report = recipe_of(parse_args(words, world_size=1))
    assert "layers" not in recipe["parallel"]
    assert report.refused == []
    block = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2"]
    assert recipe_of(parse_args([*words, *block], world_size=1))[0]["parallel"]["recompute"] == ["text.layers.{0-1}"]


def test_what_is_off_or_not_needed_keeps_no_job_out(here: Path) -> None:
    data = edited(DATA, lambda data: data["dataset_param"]["basic_parameters"].update(use_pmcc_data=False))
    recipe, report = job_of(
        MODEL, data, "--pref-ftx", "0.0", "--reuse-fp32-param", "--layerzero", "--cp-window-size", "1"
    )
    assert report.refused == []
    assert "shard" not in recipe["parallel"]
    assert [entry.key for entry in job_of(MODEL, data, "--pref-ftx", "0.5")[1].refused] == ["--pref-ftx"]


def test_a_job_whose_load_and_save_hold_no_run_yet_begins(here: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    recipe, report = job_of(MODEL, DATA, "--load", folder, "--save", folder)
    assert report.refused == []
    assert recipe["model"]["family"] == "qwen2_vl"
    assert recipe["model"].get("path") != folder


def test_stochastic_depth_is_said_to_be_left_out(here: Path) -> None:
    model = edited(MODEL, lambda data: data["image_encoder"]["vision_encoder"].update(drop_path_rate=0.4))
    outcomes = {entry.key: entry.outcome for entry in job_of(model)[1].entries}
    assert outcomes["image_encoder.vision_encoder.drop_path_rate"] == "differs"


def test_errors_of_a_recipe_name_the_flags_and_keys_of_the_job(here: Path) -> None:
    report = job_of(MODEL, DATA, "--global-batch-size", "2")[1]

    def where(error: TesseraError) -> str:
        with pytest.raises(TesseraError) as caught, in_words_of_job(report):
            raise error
        assert str(caught.value) == caught.value.render()
        return str(caught.value.where)

    said = where(TesseraError("too small", where="train.global_batch", fix="parallel.recompute: [text]"))
    assert "train.global_batch is --global-batch-size" in said
    assert "parallel.recompute is --recompute-num-layers" in said
    assert "text_decoder.pipeline_num_layers" in where(TesseraError("no", where="parallel.layers"))
    assert "text_decoder.ffn_hidden_size" in where(TesseraError("no", where="model.config.text.intermediate_size"))
    assert where(TesseraError("no", where="elsewhere")) == "elsewhere"
    fix = TesseraError("no", fix="begin a run: model.path=save dir/step-2 name=ANOTHER; checkpoint.weights_only is on")
    assert "checkpoint.weights_only is --no-save-optim" in where(fix)
    assert "begin a run: --load save dir/step-2 --save ANOTHER;" in str(fix.fix)


LORA = ("--lora-target-modules", "linear_qkv")


def saved_run(folder: Path, *more: str) -> None:
    """Write what a run of a job keeps of its settings."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(load_config(job_of(MODEL, DATA, *more)[0])))


def test_a_job_that_goes_on_takes_the_flags_of_its_new_start(here: Path, tmp_path: Path) -> None:
    saved_run(tmp_path / "s", "--min-lr", "1e-6", "--global-batch-size", "2", "--weight-decay", "0.1")

    def changes(*words: str) -> tuple[dict[str, Any], list[str]]:
        recipe, report = job_of(MODEL, DATA, "--global-batch-size", "2", *words)
        return changes_of_job(tmp_path / "s", load_config(recipe), report)

    assert changes("--min-lr", "1e-6", "--weight-decay", "0.1") == ({}, [])
    new = "--lr-decay-style cosine --lr-warmup-iters 3 --weight-decay 0.1 --clip-grad 0 --micro-batch-size 2"
    settings, words = changes(*new.split(), "--fp16")
    assert settings == {
        "train.micro_batch": 2,
        "optim.clip_norm": None,
        "optim.schedule.kind": "cosine",
        "optim.schedule.warmup": 3,
        "optim.schedule.final": 0.0,
        "precision.compute": "float16",
    }
    assert set(words) >= {
        *("--micro-batch-size: 1 -> 2", "--clip-grad: 1 -> None", "--lr-decay-style: linear -> cosine"),
        *("--lr-warmup-iters: 0 -> 3", "--min-lr: 1e-06 -> 0", "--fp16: float32 -> float16"),
    }
    for flags, said in (
        (["--seed", "7"], "job.fixed-setting --seed 1234"),
        (["--downcast-to-bf16", "--bf16"], "job.fixed-setting --downcast-to-bf16"),
        (LORA, "job.fixed-setting --lora-target-modules"),
    ):
        with raises(said):
            changes("--weight-decay", "0.1", *flags)


def test_a_job_that_goes_on_refuses_other_weights_by_name(here: Path, tmp_path: Path) -> None:
    saved_run(tmp_path / "s", *LORA)
    for words, said in (
        ([*LORA, "--lora-r", "4"], "job.fixed-setting --lora-r"),
        (["--lora-target-modules", "linear_fc1"], "job.fixed-setting --lora-target-modules"),
    ):
        recipe, report = job_of(MODEL, DATA, *words)
        with raises(said):
            changes_of_job(tmp_path / "s", load_config(recipe), report)
    saved_run(tmp_path / "whole")
    thawed = edited(MODEL, lambda data: data["image_encoder"]["vision_encoder"].update(freeze=False))
    recipe, report = job_of(thawed)
    with raises("job.fixed-setting", "image_encoder.vision_encoder.freeze"):
        changes_of_job(tmp_path / "whole", load_config(recipe), report)
    larger = edited(MODEL, lambda data: data["text_decoder"].update(ffn_hidden_size=1024))
    with raises("job.model-size-differs", "text.intermediate_size", "1024", "model.json", "18944"):
        job_of(larger, DATA, "--load", str(tmp_path / "whole"))


def write_tiny_files(root: Path) -> Path:
    """Write m.json and d.json of a tiny Qwen2-VL; return its folder."""
    hf, source = root / "ckpt" / "tiny" / "hf", EXAMPLES / "qwen2vl"
    model, data = (json.loads((source / name).read_text()) for name in ("model_7b.json", "data_7b.json"))
    (root / "m.json").write_text(json.dumps(tiny_model_json(model, hf)))
    (root / "d.json").write_text(json.dumps(tiny_data_json(data, hf)))
    return hf


def test_an_edited_entry_file_trains(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the imports of the original's own, in the folder of the job."""
    monkeypatch.chdir(tiny)
    write_tiny_files(tiny)
    words = "--mm-model m.json --mm-data d.json --num-workers 0 --eval-iters 0 --lr 1e-4 --train-iters 1"
    script = Path(__file__).parent / "entry_file_script.py"
    names = run_entry_file(script, f"{words} --global-batch-size 2 --save edited".split())
    trained = names["steps"]
    assert isinstance(trained, list)
    assert len(trained) == 2
    assert all(name.startswith(("text.", "head.")) for name in trained[0])
    with raises("job.no-effect-here", "setup_model_and_optimizer"):
        names["torch_fully_sharded_data_parallel_init"]()  # type: ignore[operator]


@pytest.mark.slow
def test_a_job_goes_on_with_another_rate_and_batch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny)
    hf = write_tiny_files(tiny)
    words = "--mm-model m.json --mm-data d.json --seq-length 384 --num-workers 0 --log-interval 1"
    pretrain(f"{words} --save s --load {hf} --lr 1e-4 --global-batch-size 2 --train-iters 1".split())
    more = "--lr 7e-3 --lr-decay-style constant --global-batch-size 4 --train-iters 2"
    pretrain(f"{words} --save s --load s {more}".split())
    line = next(line for line in capsys.readouterr().out.splitlines() if "iteration        2/" in line)
    for part in ("consumed samples:            6", "learning rate: 7.000000E-03", "global batch size:     4"):
        assert part in line


def test_tools_json_becomes_a_profile(here: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["profile"].update(enable=True, ranks=[0, 1])

    tools = edited("mindspeed_mm/tools/tools.json", change)
    recipe, report = job_of(MODEL, DATA, "--mm-tool", tools)
    assert recipe["profile"] == {"steps": [10, 11], "ranks": [0, 1], "memory": False}
    assert report.refused == []


def test_migrate_writes_the_recipe_and_reports(here: Path, tmp_path: Path) -> None:
    runner, target = CliRunner(), tmp_path / "recipe.yaml"
    words = ["migrate", "examples/qwen2vl/finetune_qwen2vl_7b.sh", "-o", str(target)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "mapped        --lr = 1e-05: optim.lr" in done.output
    assert "not needed    TASK_QUEUE_ENABLE = '2': depth" in done.output
    assert "0 not supported" in done.output
    assert tessera.plan(target, world=8).describe()
    again = runner.invoke(app, words)
    assert isinstance(again.exception, TesseraError)
    script = Path("examples/qwen2vl/finetune_qwen2vl_7b.sh").read_text()
    bad = tmp_path / "bad.sh"
    timed = script.replace("TASK_QUEUE_ENABLE=2", "HCCL_CONNECT_TIMEOUT=1200")
    bad.write_text(timed.replace("--use-flash-attn", "--calculate-square-loss"))
    refused = runner.invoke(app, ["migrate", str(bad), "-o", str(tmp_path / "bad.yaml")])
    assert refused.exit_code == 1
    assert "not supported --calculate-square-loss" in refused.output
    assert "mapped        HCCL_CONNECT_TIMEOUT = '1200': parallel.join_timeout_s" in refused.output
    for words, said in (
        (["migrate", "nowhere.sh"], "no such file"),
        (["migrate", "workspace"], "job.workspace-folder"),
    ):
        assert said in str(runner.invoke(app, words).exception)


def test_a_workspace_has_the_names_that_users_type(tmp_path: Path) -> None:
    (tmp_path / "pretrain_vlm.py").write_text("# mine\n")
    lay_out(tmp_path)
    for name in (
        *("pretrain_vlm.py", "pretrain_sora.py", "pretrain_transformers.py", "pretrain_omni.py", "inference_vlm.py"),
        *(
            "inference_sora.py",
            "evaluate_vlm.py",
            "evaluate_gen.py",
            "posttrain_qwen2vl_dpo.py",
            "posttrain_sora_dpo.py",
        ),
        *("pretrain_internvl.py", "pretrain_qwen2vl.py", "pretrain_llava.py"),
        *("mindspeed_mm/fsdp/train/trainer.py", "mindspeed_mm/tools/tools.json"),
        *("examples/qwen2vl/finetune_qwen2vl_7b.sh", "examples/qwen2vl/inference_qwen2vl_7b.sh"),
        "examples/qwen2vl/llava_instruct_2_mllm_demo_format.py",
    ):
        assert (tmp_path / name).is_file(), name
    assert (tmp_path / "pretrain_vlm.py").read_text() == "# mine\n"
    assert os.access(tmp_path / "examples/qwen2vl/finetune_qwen2vl_7b.sh", os.X_OK)
    assert all((tmp_path / name).is_dir() for name in ("logs", "data", "ckpt"))


FAMILIES = {
    "qwen2vl/finetune_qwen2vl_7b.sh": ("qwen2_vl", "model_7b.json", "data_7b.json"),
    "qwen2vl/finetune_qwen2vl_7b_lora.sh": ("qwen2_vl", "model_7b.json", "data_7b.json"),
    "qwen2vl/posttrain_qwen2vl_7b_dpo.sh": ("qwen2_vl", "model_7b_dpo.json", "data_7b_dpo.json"),
    "qwen2.5vl/finetune_qwen2_5_vl_7b.sh": ("qwen2_5_vl", "model_7b.json", "data_7b.json"),
    "qwen3vl/finetune_qwen3vl_8b.sh": ("qwen3_vl", "model_8b.json", "data_8b.json"),
    "internvl3/finetune_internvl3_8b.sh": ("internvl", "model_8b.json", "data_8b.json"),
    "glm4.1v/finetune_glm4_1v_9b.sh": ("glm4v", "model_9b.json", "data_9b.json"),
    "llava1.5/finetune_llava1_5_7b.sh": ("llava 1.5", "model_7b.json", "data_7b.json"),
}


def environment(**variables: str) -> dict[str, str]:
    paths = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    settings = {"OMP_NUM_THREADS": "1", "CPU_AFFINITY_CONF": "0", "MASTER_PORT": str(free_port()), **variables}
    return {**os.environ, **paths, **settings}


def run_command(root: Path, words: list[str], save: Path, **variables: str) -> str:
    """Run a job in a workspace and return what it printed; it has to save the weights of its second step."""
    shutil.rmtree(save, ignore_errors=True)
    done = subprocess.run(
        words, cwd=root, env=environment(**variables), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (save / "iter_0000002" / "config.yaml").is_file()
    return done.stdout


def run_script(root: Path, script: str, ranks: int, stages: int, **more: str) -> str:
    """Run an example at tiny size as a user would."""
    case, model, data = FAMILIES[script]
    folder = root / "ckpt" / case.replace(" ", "-")
    if not folder.exists():
        small_folder(case, folder)
    source, at, hf = EXAMPLES / Path(script).parent, root / "examples" / Path(script).parent, folder / "hf"
    model_json = tiny_model_json(json.loads((source / model).read_text()), hf, stages)
    (at / "tiny_model.json").write_text(json.dumps(model_json))
    (at / "tiny_data.json").write_text(json.dumps(tiny_data_json(json.loads((source / data).read_text()), hf)))
    save = root / f"save-{Path(script).stem}"
    variables = {
        **{"NPUS_PER_NODE": str(ranks), "PP": str(stages), "LOAD_PATH": str(hf), "SAVE_PATH": str(save)},
        **{"MM_MODEL": str(at / "tiny_model.json"), "MM_DATA": str(at / "tiny_data.json"), "TRAIN_ITERS": "2"},
        **{"GRAD_ACC_STEP": "2", "SEQ_LENGTH": "384", "NUM_WORKERS": "0", "SAVE_INTERVAL": "2", "PRECISION": ""},
    }
    return run_command(root, ["bash", f"examples/{script}"], save, **{**variables, **more})


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_JOBS)
def test_tiny_jobs_run(tiny: Path, name: str) -> None:
    stem, entry = Path(name).stem, "pretrain_transformers.py"
    words = ["bash", f"jobs/{name}"]
    if name.endswith("yaml"):
        entry = "mindspeed_mm/fsdp/train/trainer.py" if stem.startswith("trainer") else entry
        ranks = ["--nproc_per_node", "2", "--master_port", str(free_port())]
        words = ["torchrun", *ranks, entry, f"jobs/{name}"]
    printed = run_command(tiny, words, tiny / f"save_{stem}")
    assert len(re.findall(r"elapsed time per iteration \(ms\): ", printed)) == 2


def check_throughput(printed: str, batch: int) -> None:
    """The figure that the script computes with awk is what the log lines say."""
    times = [float(one) for one in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", printed)]
    assert len(times) == 2
    said = float(re.findall(r"Average Samples per Second: ([\d.]+)", printed)[0])
    mean = round(sum(times) / 2, 1)
    assert abs(said - batch * 1000 / mean) <= 0.0005 + batch * 1000 / mean**2 * 0.05
    assert "tokens per sample:" in printed


@pytest.mark.slow  # a shell, torchrun and a rank; the same job is planned above, and its steps run in one process below
def test_the_seeds_script_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From weights that were converted to shards, as the guide says."""
    folder = tiny / "ckpt" / "qwen2_vl"
    if not folder.exists():
        small_folder("qwen2_vl", folder)
    shards = tessera.convert(folder / "hf", tiny / "ckpt/mm_path/Qwen2-VL-7B-Instruct", to="mm", layout={})
    printed = run_script(tiny, "qwen2vl/finetune_qwen2vl_7b.sh", ranks=1, stages=1, LOAD_PATH=str(shards))
    assert "without effect here: --use-flash-attn" in printed
    check_throughput(printed, batch=2)
    # The guide's next step is given the folder of --save.
    stages = ["--cfg.parallel_config.llm_pp_layers", "[4]", "--cfg.parallel_config.vit_pp_layers", "[3]"]
    folders = ["--cfg.mm_dir", "save-finetune_qwen2vl_7b", "--cfg.save_hf_dir", "back", "--cfg.hf_config.hf_dir"]
    monkeypatch.chdir(tiny)
    with raises("layout.layer-counts"):
        mm_convert(["Qwen2VLConverter", "mm_to_hf", *folders, str(folder / "hf"), *stages[:1], "[5]", *stages[2:]])
    back = mm_convert(["Qwen2VLConverter", "mm_to_hf", *folders, str(folder / "hf"), *stages])
    assert back is not None
    trained, before = (load_file(one / "model.safetensors") for one in (back, folder / "hf"))
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "stages"),
    [
        ("qwen2vl/finetune_qwen2vl_7b.sh", 2, 2),
        ("qwen2vl/finetune_qwen2vl_7b_lora.sh", 2, 2),
        ("qwen2vl/posttrain_qwen2vl_7b_dpo.sh", 2, 1),
        ("qwen2.5vl/finetune_qwen2_5_vl_7b.sh", 2, 2),
        ("internvl3/finetune_internvl3_8b.sh", 1, 1),
        ("glm4.1v/finetune_glm4_1v_9b.sh", 2, 2),
        ("llava1.5/finetune_llava1_5_7b.sh", 1, 1),
    ],
)
def test_examples_run_at_tiny_size(tiny: Path, script: str, ranks: int, stages: int) -> None:
    check_throughput(run_script(tiny, script, ranks, stages), batch=2 * ranks // stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "case"),
    [
        ("qwen3vl/finetune_qwen3vl_8b.sh", "qwen3_vl"),
        ("qwen3vl/finetune_qwen3vl_8b_v1.sh", "qwen3_vl"),
        ("qwen3/finetune_qwen3_8b.sh", "qwen3"),
        ("qwen2/finetune_qwen2_7b.sh", "qwen2"),
        ("llama/finetune_llama3_8b.sh", "llama"),
    ],
)
def test_examples_with_yaml_run_at_tiny_size(tiny: Path, script: str, case: str) -> None:
    if script in FAMILIES:
        config = tiny / "examples" / "qwen3vl" / "tiny_fsdp2_config.yaml"
        config.write_text((EXAMPLES / "qwen3vl" / "fsdp2_config.yaml").read_text().replace("bf16", "fp32"))
        check_throughput(run_script(tiny, script, ranks=1, stages=1, FSDP2_CONFIG=str(config)), batch=2)
        return
    folder, save = tiny / "ckpt" / case, tiny / f"save-{Path(script).stem}"
    if not folder.exists():
        small_folder(case, folder)
    example = next(iter((EXAMPLES / Path(script).parent).glob(f"{Path(script).stem.removeprefix('finetune_')}.yaml")))
    job = tiny / "examples" / Path(script).parent / "tiny.yaml"
    job.write_text(tiny_yaml(example.read_text(), folder / "hf", save))
    variables = {"CONFIG": str(job), "NPUS_PER_NODE": "1", "GBS": "1"}
    check_throughput(run_command(tiny, ["bash", f"examples/{script}"], save, **variables), batch=1)


def test_inference_json_is_answered(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tiny)
    folder = tiny / "ckpt" / "qwen2_vl"
    if not folder.exists():
        small_folder("qwen2_vl", folder)
    data = json.loads((EXAMPLES / "qwen2vl" / "inference_qwen2vl_7b.json").read_text())
    data |= {"image_path": "data/COCO2017/train2017/000000000003.jpg", "min_pixels": 1024, "max_pixels": 4096}
    data["tokenizer"]["from_pretrained"] = str(folder / "hf")
    data["generation_config"] |= {"do_sample": False, "max_new_tokens": 3}
    Path("ask.json").write_text(json.dumps(data))
    image = "data/COCO2017/train2017/000000000003.jpg"
    expected = tessera.generate(folder / "hf", data["prompts"], images=[image], max_new_tokens=3)
    loads = [folder / "hf"]
    for to in ("mm", "dcp"):  # converted weights: the JSON names the folder that they are of
        loads.append(tessera.convert(folder / "hf", tiny / "ckpt" / f"ask-{to}", to=to, overwrite=True))
    for load in loads:
        inference(["--mm-model", "ask.json", "--load", str(load)])
        assert capsys.readouterr().out == f"{data['prompts']}\n{expected}\n"
    Path("ask.json").write_text(json.dumps({**data, "tokenizer": {}, "image_processer_path": None}))
    with raises("job.shards-without-model") as caught:
        inference(["--mm-model", "ask.json", "--load", str(loads[1])])
    assert "tokenizer.from_pretrained in the inference JSON" in str(caught.value.fix)


def test_inference_settings_that_change_the_answer_are_refused(here: Path) -> None:
    data = json.loads(Path("examples/qwen2vl/inference_qwen2vl_7b.json").read_text())
    data["image_path"] = "examples/qwen2vl/data_7b.json"  # any file that is there
    data["generation_config"] |= {"repetition_penalty": 1.05, "num_beams": 1, "stop_strings": None, "max_lenght": 3}
    report = JobReport()
    read_inference(data, "ask.json", report)
    assert sorted(entry.key for entry in report.refused) == [
        "generation_config.max_lenght",
        "generation_config.repetition_penalty",
    ]
    with raises("job.pipeline-class", "Qwen2VlPipeline"):
        read_inference({**data, "pipeline_class": "Qwen2VLPipeline"}, "ask.json", JobReport())


def test_the_page_of_flags_is_in_step() -> None:
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python -m tests.acceptance.flags_page"


def test_launch_flags_of_the_migration_guide(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four flags that the guide adds for FSDP2, with a back end for each kind of device."""
    monkeypatch.chdir(tiny)
    flags = "--use-torch-fsdp2 --fsdp2-config-path ./jobs/fsdp2_config.yaml --ckpt-format torch_dcp"
    backend = "--untie-embeddings-and-output-weights --distributed-backend npu:hccl,cpu:gloo"
    files = "--mm-model jobs/model_frozen.json --mm-data jobs/data.json --lr 1e-5 --train-iters 1"
    args = parse_args([*flags.split(), *backend.split(), *files.split()], world_size=2)
    assert (args.use_torch_fsdp2, args.ckpt_format, args.distributed_backend) == (
        *(True, "torch_dcp", "npu:hccl,cpu:gloo"),
    )
    recipe, report = recipe_of(args)
    assert report.refused == []
    assert recipe["parallel"] == {"backend": "fsdp2", "fsdp2_config": "./jobs/fsdp2_config.yaml"}
    tied = json.loads(Path("jobs/model.json").read_text())
    tied["text_decoder"]["untie_embeddings_and_output_weights"] = False
    Path("jobs/tied.json").write_text(json.dumps(tied))
    with raises("job.tied-embeddings"):
        recipe_of(parse_args(["--mm-model", "jobs/tied.json", *backend.split(), *files.split()[2:]]))


def test_entry_points_of_models_that_are_not_here_say_so(tiny: Path) -> None:
    for name in ("posttrain_flux_dancegrpo",):
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tiny / f"{name}.py"), run_name="__main__")
        assert ended.value.code == 2


def test_the_conversion_script_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)
    write_mllm_data(tmp_path, rows=3)
    target = tmp_path / "data" / "mllm_format_llava_instruct_data.json"
    target.unlink()
    monkeypatch.chdir(tmp_path)
    runpy.run_path("examples/qwen2vl/llava_instruct_2_mllm_demo_format.py", run_name="__main__")
    rows = json.loads(target.read_text())
    assert rows[0]["images"] == ["./data/COCO2017/train2017/000000000000.jpg"]


@pytest.mark.slow
def test_a_benchmark_is_evaluated(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tiny)
    image = base64.b64encode(Path("data/COCO2017/train2017/000000000001.jpg").read_bytes()).decode()
    rows = [["0", "What is it?", image, "red", "blue", "A"], ["1", "And this?", "0", "tall", "old", "B"]]
    lines = ["\t".join(row) for row in (["index", "question", "image", "A", "B", "answer"], *rows)]
    Path("bench.tsv").write_text("\n".join(lines) + "\n")
    settings = json.loads((EXAMPLES / "qwen2vl" / "inference_qwen2vl_7b.json").read_text())
    for key in ("image_path", "prompts", "pipeline_class"):
        del settings[key]
    settings |= {"model_id": "Qwen2VlPipeline", "evaluation_dataset": "ai2d_test", "dataset_path": "bench.tsv"}
    settings |= {"result_output_path": "scores", "min_pixels": 1024, "max_pixels": 4096, "evaluation_model": "any"}
    settings["generation_config"] = {"max_new_tokens": 2, "do_sample": False}
    Path("evaluate.json").write_text(json.dumps(settings))
    evaluate(["--mm-model", "evaluate.json", "--load", "ckpt/tiny/hf"])
    records = [json.loads(line) for line in Path("scores/ai2d_test.jsonl").read_text().splitlines()]
    assert [record["index"] for record in records] == ["0", "1"]
    mean = sum(record["score"] for record in records) / 2
    assert capsys.readouterr().out == f"ai2d_test: {mean:.4f}\n"
    header, *sheet = openpyxl.load_workbook("scores/ai2d_test.xlsx").active.values
    assert header == ("index", "question", "answer", "prediction", "hit")
    assert [(row[0], row[2], row[4]) for row in sheet] == [
        ("0", "A", records[0]["score"]),
        ("1", "B", records[1]["score"]),
    ]
    Path("bench.tsv").rename("AI2D_TEST.tsv")
    scored = tessera.evaluate("ckpt/tiny/hf", data="AI2D_TEST.tsv", max_samples=1, max_new_tokens=2)
    assert scored.results[0].questions == 1
    settings["evaluation_dataset"] = "ai2d"
    Path("evaluate.json").write_text(json.dumps(settings))
    with raises("evaluation.unknown-benchmark", "ai2d_test"):
        evaluate(["--mm-model", "evaluate.json", "--load", "ckpt/tiny/hf"])


def test_cells_of_answers_are_never_formulas(tmp_path: Path) -> None:
    row = {
        "index": "1",
        "question": "=1+1",
        "expected": ["a", "b"],
        "answer": "=cmd|'x'!A0\x1b" + "y" * 40_000,
        "score": 0,
    }
    write_sheet(tmp_path / "a.xlsx", [row])
    cells = next(openpyxl.load_workbook(tmp_path / "a.xlsx").active.iter_rows(min_row=2))
    assert [cell.data_type for cell in cells] == ["s", "s", "s", "s", "n"]
    assert cells[2].value == "a | b"
    assert len(cells[3].value) == LONGEST_CELL


def test_modules_that_published_files_wrap_are_known(here: Path, tmp_path: Path) -> None:
    """Published files of the trainer name containers as well, and a load balancing loss of weight 0."""
    text = Path("examples/qwen3vl/qwen3vl_8b_v1.yaml").read_text()
    wrapped = ["merger", "deepstack_merger_list.{*}"]
    names = [*(f"model.visual.{name}" for name in wrapped), "model.visual", "model.language_model", "lm_head"]
    more = "".join(f"      - {name}\n" for name in ("model.language_model.embed_tokens", *names))
    text = text.replace(
        "      - model.language_model.layers.{*}\n", f"      - model.language_model.layers.{{*}}\n{more}", 1
    )
    text = text.replace("features:\n", "features:\n  loss_cfg: {loss_type: default, router_aux_loss_coef: 0.0}\n")
    job = tmp_path / "published.yaml"
    job.write_text(text)
    recipe = migrate(job, world_size=8).recipe
    assert "config" not in recipe["model"]
    assert tessera.plan(recipe, world=8).describe()


def yaml_job(**sections: dict[str, Any]) -> tuple[dict[str, Any], JobReport]:
    """Translate a published file of six sections with other keys."""
    data = read_job_yaml(Path("examples/qwen3vl/qwen3vl_8b_v1.yaml"))
    for name, keys in sections.items():
        data[name] = {key: value for key, value in {**(data.get(name) or {}), **keys}.items() if value is not ...}
    return recipe_of_yaml(data, "job.yaml", 2)


def test_recompute_stands_where_the_version_of_the_file_has_it(here: Path) -> None:
    """Files of 26.0.0 have it in the section parallel, with a list."""
    layers, blocks = "model.language_model.layers.{*}", "model.visual.blocks.{*}"
    off = {"recompute": ..., "recompute_plan": ...}
    recipe, report = yaml_job(parallel={"recompute": True, "recompute_plan": [layers]}, features=off)
    assert (report.refused, recipe["parallel"]["recompute"]) == ([], [layers])
    recipe, report = yaml_job(parallel={"recompute": False, "recompute_plan": [layers]}, features=off)
    assert (report.refused, "recompute" in recipe["parallel"]) == ([], False)
    newer = {"recompute": True, "recompute_plan": {"apply_modules": [blocks]}}
    recipe, report = yaml_job(parallel={"recompute": True, "recompute_plan": [layers]}, features=newer)
    assert (report.refused, recipe["parallel"]["recompute"]) == ([], [blocks])


def test_dcp_weights_of_a_yaml_job_are_weights_and_no_folder_of_a_model(here: Path, tmp_path: Path) -> None:
    described = yaml_job()[0]["model"]["path"]
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / ".metadata").touch()
    for load, form in ((tmp_path / "nowhere", "dcp"), (tmp_path / "release", "auto"), (tmp_path / "release", None)):
        model = yaml_job(training={"load": str(load), "load_format": form})[0]["model"]
        assert (model["path"], model["weights"]) == (described, str(load))
    model = yaml_job(training={"load": "ckpt/hf_path/Other", "load_format": "hf"})[0]["model"]
    assert (model["path"], "weights" in model) == ("ckpt/hf_path/Other", False)


def test_errors_of_a_job_name_its_own_files_and_keys(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    Path("trained.yaml").write_text("ignored_modules: [image_encoder]\n")
    words = "--mm-model jobs/model.json --mm-data jobs/data.json --load ckpt/tiny/hf --lr 1e-4 --train-iters 1"
    words += " --micro-batch-size 1 --global-batch-size 2 --use-torch-fsdp2 --fsdp2-config-path trained.yaml"
    with raises("layout.ignored-module-trained") as caught:
        pretrain(words.split())
    assert "parallel.ignore is ignored_modules of trained.yaml" in str(caught.value.where)
    assert "model.freeze is image_encoder.vision_encoder.freeze" in str(caught.value.where)
    job = read_job_yaml(Path("jobs/trainer_ulysses.yaml"))
    job["parallel"]["fsdp_plan"]["apply_modules"] = ["model.language_model.layer.{*}"]
    job["training"] |= {"load": "ckpt/nowhere", "load_format": "dcp"}
    recipe, report = recipe_of_yaml(job, "job.yaml", 2)
    with raises("recipe.pattern-matches-nothing") as caught, in_words_of_job(report):
        tessera.plan(recipe, world=2)
    assert "parallel.wrap is parallel.fsdp_plan.apply_modules" in str(caught.value.where)
    for key, place in (
        ("model.weights", "training.load"),
        ("parallel.ignore", "fsdp_plan.ignored_modules of job.yaml"),
    ):
        with pytest.raises(TesseraError, match=place), in_words_of_job(report):
            raise TesseraError("no", where=key)


@pytest.mark.slow
def test_the_walk_through_of_the_guide_from_the_shell(tiny: Path) -> None:
    """Seed 001 from the weights of the hub to the weights of the trained model, each step as its own command."""
    folder = tiny / "ckpt" / "qwen2_vl"
    if not folder.exists():
        small_folder("qwen2_vl", folder)
    name = "Qwen2-VL-7B-Instruct"
    (tiny / "ckpt/hf_path").mkdir(exist_ok=True)
    shutil.copytree(folder / "hf", tiny / "ckpt/hf_path" / name)
    command = str(Path(sys.executable).parent / "mm-convert")

    def mm_convert(line: str) -> subprocess.CompletedProcess[str]:
        words = [command, *line.split()]
        return subprocess.run(words, cwd=tiny, env=environment(), capture_output=True, text=True, check=False)

    wrong = mm_convert("Qwen2VLConverter hf_to_mm --cfg.mm_dirr x")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean: --cfg.mm_dir" in wrong.stderr
    source, lists = f"--cfg.hf_config.hf_dir ckpt/hf_path/{name}", "--cfg.parallel_config.{}_pp_layers {}"
    nested = " ".join(lists.format(*one) for one in (("llm", "[[1,3]]"), ("vit", "[[3,0]]")))
    done = mm_convert(f"Qwen2VLConverter hf_to_mm --cfg.mm_dir ckpt/mm_path/walk {source} {nested}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote ckpt/mm_path/walk\n"
    path = "qwen2vl/finetune_qwen2vl_7b.sh"
    printed = run_script(tiny, path, ranks=2, stages=2, LOAD_PATH="ckpt/mm_path/walk")
    check_throughput(printed, batch=2)
    flat = nested.replace("[[", "[").replace("]]", "]")
    saved = f"--cfg.mm_dir save-{Path(path).stem} --cfg.save_hf_dir ckpt/mm_to_hf/{name}"
    back = mm_convert(f"Qwen2VLConverter mm_to_hf {saved} {source} {flat} --cfg.parallel_config.tp_size 1")
    assert back.returncode == 0, back.stderr
    written, before = (load_file(one / "model.safetensors") for one in (tiny / "ckpt/mm_to_hf" / name, folder / "hf"))
    assert written.keys() == before.keys()
    assert any(not written[key].equal(before[key]) for key in before)
