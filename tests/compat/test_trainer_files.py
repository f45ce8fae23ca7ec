"""Files of DeepSpeed, accelerate, LLaMA-Factory, ms-swift and axolotl become recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.run_config import load_config
from tessera_compat.trainer_files.rules import accelerate_rules, deepspeed_rules, fsdp_rules, hf_rules
from tessera_compat.trainer_files.translate import trainer_of
from tests.errors import raises

ZERO3: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 200}},
    "fp16": {"enabled": False, "initial_scale_power": 14, "loss_scale_window": 1000},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
    },
    "steps_per_print": 5,
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
machine_rank: 0
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer
  fsdp_offload_params: true
  fsdp_use_orig_params: true
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
freeze_vision_tower: true
dataset: mine
template: qwen2_vl
cutoff_len: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
output_dir: saves/qwen2_5vl/sft
save_steps: 500
report_to: none
deepspeed: ds.json
"""
SWIFT = """
model: ./qwen
tuner_type: full
dataset: ['train.jsonl#500', 'b.jsonl']
max_length: 2048
per_device_train_batch_size: 1
max_steps: 100
warmup_ratio: 0.1
learning_rate: 1e-5
freeze_vit: true
torch_dtype: bfloat16
gradient_checkpointing: true
"""
AXOLOTL = """
base_model: org/model
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: data.jsonl
    type: chat_template
sequence_len: 8192
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
flash_attention: true
warmup_steps: 10
output_dir: ./outputs/out
"""


def migrated(path: Path, *options: str) -> tuple[dict[str, Any], str, int]:
    """Return the recipe that the command writes, its output and its exit code."""
    target = path.with_suffix(".recipe.yaml")
    done = CliRunner().invoke(app, ["migrate", str(path), "-o", str(target), *options], catch_exceptions=False)
    load_config(target)
    return yaml.safe_load(target.read_text()), done.output, done.exit_code


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_deepspeed_json(tmp_path: Path) -> None:
    recipe, output, code = migrated(written(tmp_path, "ds.json", json.dumps(ZERO3)))
    assert code == 0, output
    schedule = {"kind": "cosine", "warmup": 10}
    optim = {"name": "adamw", "lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
    assert recipe["optim"] == {**optim, "schedule": schedule}
    assert recipe["train"] == {"samples_per_step": 32, "steps": 200}
    assert recipe["parallel"] == {"shard": "auto", "offload": True, "pin_memory": True}
    assert recipe["precision"]["compute"] == "bfloat16"
    assert "loss_scale" not in recipe["precision"]
    assert "not needed    fp16.initial_scale_power = 14: fp16 is off" in output
    assert "(model.path) = 'path/to/model'" in output
    for key in (*ZERO3, "optimizer.params.lr", "zero_optimization.stage"):
        assert isinstance(ZERO3.get(key), dict) or f" {key} = " in output, key


def test_accelerate_yaml_with_fsdp1(tmp_path: Path) -> None:
    recipe, output, code = migrated(written(tmp_path, "accelerate.yaml", ACCELERATE))
    assert code == 0, output
    expected = {"shard": "auto", "reshard_after_forward": False, "prefetch_backward": 1, "offload": True}
    assert recipe["parallel"] == expected
    assert "--nproc 8 --nnodes 2" in output


def test_llama_factory_yaml_with_its_deepspeed_file_and_data_set(tmp_path: Path) -> None:
    written(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    (tmp_path / "data").mkdir()
    written(tmp_path / "data", "dataset_info.json", json.dumps({"mine": {"file_name": "mine.json"}}))
    recipe, output, code = migrated(written(tmp_path, "job.yaml", LLAMA_FACTORY), "--world", "4")
    assert code == 0, output
    assert recipe["model"]["path"] == "hf://Qwen/Qwen2.5-VL-3B-Instruct"
    assert recipe["model"]["lora"] == {
        "rank": 8,
        "alpha": 16,
        "targets": ["text.layers.{*}.attn.q", "text.layers.{*}.attn.v"],
    }
    assert "freeze" not in recipe["model"]
    assert recipe["data"] == {"train": [{"path": str(tmp_path / "data" / "mine.json")}], "length": 4096}
    assert recipe["train"] == {"epochs": 3.0, "samples_per_step": 64}
    assert recipe["parallel"] == {"shard": "auto", "reshard_after_forward": False}
    assert (recipe["out"], recipe["name"]) == ("saves/qwen2_5vl", "sft")
    assert recipe["checkpoint"] == {"every": 500}


def test_ms_swift_yaml(tmp_path: Path) -> None:
    recipe, output, code = migrated(written(tmp_path, "swift.yaml", SWIFT))
    assert code == 0, output
    assert recipe["model"] == {"path": "./qwen", "freeze": ["vision"]}
    assert recipe["data"]["train"] == [{"path": "train.jsonl", "max_samples": 500}, {"path": "b.jsonl"}]
    assert recipe["optim"] == {"lr": 1e-5, "weight_decay": 0.1, "schedule": {"warmup": 10}}
    assert recipe["train"] == {"samples_per_step": 16, "steps": 100}
    assert recipe["parallel"]["recompute"] == ["text.layers.{*}"]


def test_axolotl_yaml(tmp_path: Path) -> None:
    recipe, output, code = migrated(written(tmp_path, "axolotl.yaml", AXOLOTL))
    assert code == 0, output
    assert recipe["model"]["lora"] == {"quantize": "nf4", "rank": 32, "alpha": 16}
    assert recipe["data"] == {"train": [{"path": "data.jsonl"}], "length": 8192, "pack": True}
    assert recipe["optim"]["schedule"] == {"kind": "cosine", "warmup": 10}


def test_unknown_keys_are_named_with_the_nearest_and_the_rest_is_translated(tmp_path: Path) -> None:
    text = SWIFT + "learning_rte: 3\npacking_fast: 1\nlr_scheduler_type: polynomial\n"
    recipe, output, code = migrated(written(tmp_path, "swift.yaml", text))
    assert code == 1
    assert "learning_rte = 3: unknown key; did you mean learning_rate?" in output
    assert "not supported lr_scheduler_type = 'polynomial'" in output
    assert recipe["optim"]["lr"] == 1e-5


JOB = "model_name_or_path: org/model\nlearning_rate: 1e-4\ndataset: d.json\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("learning_rate: .nan", "not supported learning_rate = nan: not a number"),
        ("learning_rate: true", "not supported learning_rate = True: not a number"),
        ("output_dir: '${oc.env:HOME}/x'", "not supported output_dir = '${oc.env:HOME}/x': variables are not resolved"),
        ("optim: adamw_bnb_8bit", "not supported optim = 'adamw_bnb_8bit': 8-bit optimizer states are not supported"),
        (
            "saves_per_epoch: 4",
            "not supported saves_per_epoch = 4: set checkpoint.every in the recipe to 1epoch or to a number of steps",
        ),
        ("saves_per_epoch: 1", "mapped        saves_per_epoch = 1: checkpoint.every"),
        ("max_samples: 20", "not needed    max_samples = 20: with dataset"),
        ("nobody_knows_it:", "not needed    nobody_knows_it = None: not set"),
    ],
)
def test_values_of_a_job(text: str, line: str, tmp_path: Path) -> None:
    base = "".join(row for row in JOB.splitlines(True) if row.partition(":")[0] != text.partition(":")[0])
    _, output, _ = migrated(written(tmp_path, "job.yaml", f"{base}{text}\n"))
    assert line in output


def test_a_timeout_of_years_is_the_longest_that_is_allowed(tmp_path: Path) -> None:
    recipe, _, _ = migrated(written(tmp_path, "job.yaml", JOB + "ddp_timeout: 180000000\nmax_samples: 20\n"))
    assert recipe["parallel"] == {"timeout_s": 86400.0}
    assert recipe["data"]["train"] == [{"path": "d.json", "max_samples": 20}]


def test_what_a_file_leaves_out_has_the_value_of_its_trainer(tmp_path: Path) -> None:
    recipe, output, _ = migrated(written(tmp_path, "job.yaml", "model_name_or_path: org/model\nlora_rank: 4\n"))
    assert recipe["model"]["lora"] == {"rank": 4, "alpha": 8}
    assert recipe["optim"] == {"lr": 5e-5, "betas": [0.9, 0.999], "schedule": {"kind": "linear"}}
    assert recipe["train"] == {"epochs": 3.0, "samples_per_step": 8}
    assert "mapped        (learning_rate) = 5e-05: optim.lr" in output
    recipe, _, _ = migrated(written(tmp_path, "swift.yaml", "model: org/model\n"), "--world", "4")
    assert recipe["model"]["lora"] == {"rank": 8, "dropout": 0.05}
    assert recipe["optim"] == {"lr": 1e-4, "weight_decay": 0.1}
    assert recipe["train"] == {"epochs": 3.0, "samples_per_step": 16}
    recipe, _, _ = migrated(written(tmp_path, "full.yaml", "model: org/model\ntuner_type: full\n"))
    assert "lora" not in recipe["model"]
    assert recipe["optim"]["lr"] == 1e-5


def test_a_wrong_value_is_named_by_the_key_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "job.yaml", "model_name_or_path: org/model\nlearning_rate: -1\n")
    with raises("recipe.wrong-value", "job.yaml: learning_rate"):
        CliRunner().invoke(app, ["migrate", str(path), "-o", str(tmp_path / "r.yaml")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.json", "{", "job.invalid-json"),
        ("a.json", "[1]", "job.not-a-mapping"),
        ("a.json", '{"x": 1}', "job.not-a-job"),
        ("a.yaml", "a: [", "job.invalid-yaml"),
        ("a.yaml", "x: 1\n", "job.not-a-job"),
    ],
)
def test_files_that_are_no_jobs_are_refused(name: str, text: str, code: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    with raises(code):
        CliRunner().invoke(app, ["migrate", str(path), "-o", str(tmp_path / "r.yaml")], catch_exceptions=False)
    assert not (tmp_path / "r.yaml").exists()


@pytest.mark.slow
def test_odd_values_never_end_in_a_traceback(tmp_path: Path) -> None:
    odd: list[Any] = [None, "x", -1, 0, 1e400, [], {}, [1], {"a": {}}, True, "auto", "1e-5"]
    for rules, base in (
        (deepspeed_rules(), {"zero_optimization": {}}),
        (accelerate_rules(), {"distributed_type": "NO"}),
        (fsdp_rules(), {"sharding_strategy": "NO_SHARD"}),
        (hf_rules(), {"model_name_or_path": "m"}),
    ):
        for number, value in enumerate(odd):
            keys = {key: value for at, key in enumerate(rules) if "." not in key and (at + number) % 3 == 0}
            path = written(tmp_path, "odd.json", json.dumps({**keys, **base}))
            if not trainer_of({**keys, **base}):
                continue
            target = tmp_path / "odd.yaml"
            target.unlink(missing_ok=True)
            done = CliRunner().invoke(app, ["migrate", str(path), "-o", str(target)])
            assert isinstance(done.exception, (type(None), SystemExit, tessera.TesseraError)), (keys, done.exception)


@pytest.mark.slow
def test_a_recipe_of_another_trainers_file_runs_dry(tmp_path: Path) -> None:
    recipe, _, _ = migrated(written(tmp_path, "ds.json", json.dumps(ZERO3)))
    changes = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "data": {"length": 64}}
    roles = tessera.dry_run({**recipe, **changes}, world=2)
    assert roles
