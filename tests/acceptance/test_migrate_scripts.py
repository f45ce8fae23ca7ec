"""Scripts of the forms that MindSpeed-MM ships: what `tessera migrate` makes of each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera_compat.mindspeed_mm.migrate import MigratedJob, lay_out, migrate
from tests.acceptance.job_cases import write_published_configs

HOSTS = """
NPUS_PER_NODE=8
HOSTFILE=examples/hostfile.txt
MASTER_ADDR=$(head -n1 $HOSTFILE | awk '{print $1;}')
MASTER_PORT=6001
NODE_ADDR=`hostname -I | awk '{print $1}'`
NODE_RANK=$(awk '{ranks[$1]=(FNR-1);}END{print ranks["'$NODE_ADDR'"];}' $HOSTFILE)
NNODES=$(cat $HOSTFILE | wc -l)
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
PP=4
TP=4
GBS=$((2*$WORLD_SIZE/$PP/$TP))
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR \\
    --master_port $MASTER_PORT pretrain_vlm.py --mm-model examples/qwen2vl/model_7b.json \\
    --mm-data examples/qwen2vl/data_7b.json --lr 1e-5 --train-iters 9 --global-batch-size $GBS --micro-batch-size 1 \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    lay_out(root)
    write_published_configs(root)
    return root


@pytest.fixture(autouse=True)
def _here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


def script(tmp_path: Path, text: str, **environment: str) -> MigratedJob:
    path = tmp_path / "job.sh"
    path.write_text(text)
    return migrate(path, environment=environment)


def outcome(job: MigratedJob, key: str) -> str:
    (entry,) = [entry for entry in job.report.entries if entry.key == key]
    return f"{entry.outcome}: {entry.note}"


def edited(tmp_path: Path, source: str, changes: Mapping[str, Any]) -> str:
    """Write a JSON or YAML file with dotted keys changed, and return its path."""
    path = Path(source)
    data = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    for dotted, value in changes.items():
        section = data
        *parents, last = dotted.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    target = tmp_path / path.name
    target.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(data))
    return str(target)


def by_flags(tmp_path: Path, model: str, data: str, *more: str, entry: str = "pretrain_vlm.py") -> MigratedJob:
    words = ["--mm-model", model, "--mm-data", data, "--lr", "1e-5", "--train-iters", "9", *more]
    return script(tmp_path, f"torchrun --nproc_per_node 1 {entry} {' '.join(words)}\n")


# ------------------------------------------------------------------------------------------ machines


def test_a_job_of_two_machines_says_what_each_of_them_starts(tmp_path: Path) -> None:
    job = migrate(Path("examples/qwen2vl/finetune_qwen2vl_7b.sh"), environment={"NNODES": "2", "MASTER_PORT": "6005"})
    assert job.start(Path("r.yaml")).endswith(
        "tessera train r.yaml --nproc 8 --nnodes 2 --node-rank R --master HOST:6005"
    )
    assert migrate(Path("examples/qwen2vl/finetune_qwen2vl_7b.sh"), world_size=24).machines == 3
    two = tmp_path / "two.sh"
    two.write_text("NNODES=2\n" + Path("examples/qwen2vl/finetune_qwen2vl_7b.sh").read_text())
    printed = CliRunner().invoke(app, ["migrate", str(two), "-o", str(tmp_path / "two.yaml")])
    assert "on each of the 2 machines (R from 0 to 1; HOST is machine 0)" in printed.output


def test_machines_are_counted_in_a_file_or_said_by_the_environment(tmp_path: Path) -> None:
    fewest = script(tmp_path, HOSTS)
    assert (fewest.machines, fewest.world_size, fewest.recipe["train"]["global_batch"]) == (2, 16, 2)
    assert outcome(fewest, "line 8").startswith("differs: examples/hostfile.txt is not on this machine: 2 machines")
    said = script(tmp_path, HOSTS, NNODES="4")
    assert (said.machines, said.recipe["train"]["global_batch"]) == (4, 4)
    assert outcome(said, "line 8").startswith("mapped: value of the environment")
    hosts = Path("examples/hostfile.txt")
    hosts.write_text("".join(f"10.0.0.{n}\n" for n in range(6)))
    try:
        counted = script(tmp_path, HOSTS)
    finally:
        hosts.unlink()
    assert (counted.machines, counted.port) == (6, 6001)
    assert not [entry for entry in counted.report.entries if entry.source == "script"]


def test_a_file_of_samples_is_not_taken_for_one_of_machines(tmp_path: Path) -> None:
    text = HOSTS.replace("GBS=$((2*$WORLD_SIZE/$PP/$TP))", "GBS=$(wc -l < data/samples.jsonl)")
    with pytest.raises(Exception, match="output of a command"):
        script(tmp_path, text)
    assert script(tmp_path, text, GBS="8").recipe["train"]["global_batch"] == 8


def test_an_exit_where_a_file_is_missing_is_passed_over(tmp_path: Path) -> None:
    text = 'HF=ckpt/nowhere\nif [ ! -f "$HF/modeling.py" ]; then\n  echo missing\n  exit 1\nfi\n'
    job = script(tmp_path, text + Path("examples/qwen2vl/finetune_qwen2vl_7b.sh").read_text())
    assert outcome(job, "line 4").startswith("not needed: ckpt/nowhere/modeling.py is not on this machine")


def test_a_script_that_goes_to_its_own_root_is_read(tmp_path: Path) -> None:
    text = Path("examples/qwen2vl/finetune_qwen2vl_7b.sh").read_text()
    moved = Path("examples/qwen2vl/moved.sh")
    moved.write_text('cd "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/../.."\n' + text)
    try:
        assert migrate(moved).recipe
    finally:
        moved.unlink()


def test_a_placeholder_of_several_words_is_one_value(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        'SAVE="path to save your weights"\n'
        "torchrun --nproc_per_node 4 pretrain_vlm.py --mm-model examples/qwen2vl/model_7b.json --mm-data "
        "examples/qwen2vl/data_7b.json --lr 1e-5 --train-iters 9 --save $SAVE --pipeline-model-parallel-size 4\n",
    )
    assert job.recipe["out"] == "path to save your weights"
    entries = [entry for entry in job.report.entries if entry.source == "script"]
    assert [(entry.key, entry.outcome) for entry in entries] == [("--save", "differs")]
    assert "in line 1" in entries[0].note


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (
            "examples/qwen3vl/qwen3vl_8b_v1.yaml",
            {"model.model_id": "kimi_k25", "model.model_name_or_path": "ckpt/Kimi"},
        ),
        ("examples/qwen3vl/model_8b.json", {"model_id": "glm4v_moe", "init_from_hf_path": "ckpt/GLM4.5V"}),
    ],
)
def test_a_model_that_nothing_here_trains_is_said_so(tmp_path: Path, source: str, changes: Mapping[str, str]) -> None:
    path = edited(tmp_path, source, changes)
    data = "examples/qwen3vl/data_8b.json"
    job = migrate(Path(path)) if path.endswith("yaml") else by_flags(tmp_path, path, data)
    name = next(iter(changes.values()))
    assert any(f"no model family of Tessera trains {name}" in entry.note for entry in job.report.refused)
    unedited = migrate(Path(source)) if source.endswith("yaml") else by_flags(tmp_path, source, data)
    assert not unedited.report.refused


def test_sizes_of_model_json_hold_against_those_of_the_command_line(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        "torchrun --nproc_per_node 4 pretrain_vlm.py --mm-model examples/glm4.1v/model_9b.json --mm-data "
        "examples/glm4.1v/data_9b.json --lr 1e-5 --train-iters 9 --vocab-size 7 --pipeline-model-parallel-size 4\n",
    )
    assert "model_9b.json has 151552" in outcome(job, "--vocab-size")
    assert job.recipe["model"]["config"]["text"]["vocab_size"] == 151552


def test_keys_of_older_internvl_files(tmp_path: Path) -> None:
    fusions = ("masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm")
    text = dict.fromkeys((*fusions, "apply_query_key_layer_scaling", "layernorm_zero_centered_gamma"), False)
    more = {
        "initializer_factor": 0.1,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "reset_attention_mask": False,
    }
    vision = {"q_layernorm": "RMSNorm", "k_layernorm": "RMSNorm", "drop_path_rate": 0.4, "sequence_parallel": False}
    changes = {f"text_decoder.{key}": value for key, value in {**text, **more}.items()}
    changes |= {f"image_encoder.vision_encoder.{key}": value for key, value in vision.items()}
    changes |= {"image_encoder.vision_encoder.pipeline_num_layers": None, "text_decoder.pipeline_num_layers": None}
    data = "examples/internvl3/data_8b.json"
    assert not by_flags(tmp_path, edited(tmp_path, "examples/internvl3/model_8b.json", changes), data).report.refused
    scaled = {**changes, "text_decoder.rope_scaling": {"type": "yarn", "factor": 2.0}}
    job = by_flags(tmp_path, edited(tmp_path, "examples/internvl3/model_8b.json", scaled), data)
    assert [entry.key for entry in job.report.refused] == ["text_decoder.rope_scaling"]


def test_weights_of_one_tower_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "examples/llava1.5/model_7b.json", {"text_decoder.ckpt_path": "vicuna.pt"})
    job = by_flags(tmp_path, path, "examples/llava1.5/data_7b.json", entry="pretrain_llava.py")
    assert [entry.key for entry in job.report.refused] == ["text_decoder.ckpt_path"]


def test_modules_that_the_fsdp2_file_recomputes_are_said_once(tmp_path: Path) -> None:
    path = edited(tmp_path, "examples/qwen3vl/model_8b.json", {"text_decoder.recompute_granularity": "full"})
    (tmp_path / "fsdp2.yaml").write_text("recompute_modules:\n  - text.layers.{*}\n")
    flags = ("--use-torch-fsdp2", "--fsdp2-config-path", str(tmp_path / "fsdp2.yaml"))
    job = by_flags(tmp_path, path, "examples/qwen3vl/data_8b.json", *flags)
    assert "recompute" not in job.recipe["parallel"]
    assert outcome(job, "text_decoder.recompute_granularity").startswith("not needed")


# ------------------------------------------------------------------------------------------ YAML of the FSDP2 trainer


def trainer_yaml(tmp_path: Path, **changes: Any) -> MigratedJob:
    return migrate(Path(edited(tmp_path, "examples/qwen3vl/qwen3vl_8b_v1.yaml", changes)), world_size=2)


def test_recomputation_of_files_up_to_26_0_0_stands_in_the_section_parallel(tmp_path: Path) -> None:
    plan = ["model.language_model.layers.{*}"]
    changes = {"features": {}, "parallel.recompute": True, "parallel.recompute_plan": plan}
    job = trainer_yaml(tmp_path, **changes)
    assert job.recipe["parallel"]["recompute"] == plan
    assert not job.report.refused


def test_the_switches_that_came_in_2026(tmp_path: Path) -> None:
    held_out = yaml.safe_load(Path("examples/qwen3vl/qwen3vl_8b_v1.yaml").read_text())["data"]["dataset_param"]
    changes = {
        "training.optimizer": "adamw_swap",
        "training.mem_fraction_static": 0.5,
        "data.dataloader_param.enable_preload": True,
        "data.val_dataset_param": held_out,
        "training.val_interval": 7,
        "training.val_micro_batch_size": 2,
        "training.save_ckpt_dtype": "bf16",
        "features.skip_moe_pad_tokens": True,
        "features.enable_chunk_loss": True,
        "features.chunkloss_plan": {"apply_module": "lm_head", "chunk_size": None, "impl_type": "cce"},
        "features.swap_plan": {"capacity_mb": 2048},
        "training.manual_gc_interval": 100,
    }
    job = trainer_yaml(tmp_path, **changes)
    assert not job.report.refused
    assert job.recipe["parallel"]["offload"]
    assert job.recipe["train"]["eval_every"] == 7
    assert job.recipe["data"]["eval"] == job.recipe["data"]["train"]
    assert [entry.key for entry in trainer_yaml(tmp_path, **{"training.optimizer": "lion"}).report.refused] == [
        "training.optimizer"
    ]


def test_a_container_of_wan_trains_its_transformer(tmp_path: Path) -> None:
    folder = "ckpt/hf_path/Wan2.2-T2V-A14B-Diffusers"
    model = json.loads(Path("examples/wan2.2/A14B/t2v/pretrain_model_low.json").read_text())
    predictor = {key: value for key, value in model["predictor"].items() if key not in ("pipeline_num_layers", "task")}
    predictor |= {
        "model_id": "wan2_2_predictor",
        "model_type": "wan2_2-t2v",
        "from_pretrained": f"{folder}/transformer_2",
    }
    data = json.loads(Path("examples/wan2.2/A14B/t2v/data.json").read_text())
    data["dataset_param"]["dataset_type"] = "wan2_2"
    modules = ["text_encoder", "predictor.blocks.{*}", "predictor.blocks.{*}.self_attn", "predictor.head"]
    job = {
        "parallel": {"fsdp_plan": {"apply_modules": modules, "ignored_modules": ["ae"], "param_dtype": "bf16"}},
        "model": {
            "model_id": "wan2_2_container",
            "task": "t2v",
            "models": {
                "ae": {**model["ae"], "freeze": True, "meta_init": False},
                "text_encoder": {**model["text_encoder"], "load_format": "hf"},
                "predictor": {**predictor, "freeze": False, "attn_implementation": "flash_attention_2"},
            },
        },
        "data": data,
        "features": {"recompute": True, "recompute_plan": {"apply_modules": ["predictor.blocks.{*}"]}},
        "training": {"lr": 1e-5, "train_iters": 9, "lr_decay_style": "constant"},
    }
    path = tmp_path / "container.yaml"
    path.write_text(yaml.safe_dump(job))
    done = migrate(path, world_size=2)
    assert not done.report.refused
    assert done.recipe["model"]["path"] == f"{folder}/transformer_2"
    assert done.recipe["parallel"]["wrap"] == ["blocks.{*}", "blocks.{*}.attn", "head"]
    assert done.recipe["parallel"]["recompute"] == ["blocks.{*}"]
    assert done.recipe["train"]["task_options"]["encoders"]["folder"] == folder


def test_cogvideox_with_the_vae_of_its_makers_names_the_folder_beside_it(tmp_path: Path) -> None:
    source, data = "examples/cogvideox/t2v_1.0/model_cogvideox_t2v.json", "examples/cogvideox/data.json"
    changes = {"ae.from_pretrained": "3d-vae.pt", "text_encoder.from_pretrained": "ckpt/hf_path/CogVideoX-5b"}
    job = by_flags(tmp_path, edited(tmp_path, source, changes), data, entry="pretrain_sora.py")
    assert job.recipe["train"]["task_options"]["encoders"]["folder"].endswith("CogVideoX-5b")
    assert "differs" in [entry.outcome for entry in job.report.entries if entry.key == "ae.from_pretrained"]


# ------------------------------------------------------------------------------------------ scripts that train nothing


def commands(path: str) -> list[list[str]]:
    return [shlex.split(line) for line in migrate(Path(path)).start(Path("r.yaml")).splitlines()]


def test_an_inference_script_becomes_a_command_for_each_question() -> None:
    (words,) = commands("examples/qwen2vl/inference_qwen2vl_7b.sh")
    settings = json.loads(Path("examples/qwen2vl/inference_qwen2vl_7b.json").read_text())
    assert words[:3] == ["tessera", "generate", "ckpt/hf_path/Qwen2-VL-7B-Instruct"]
    assert words[3:6] == [settings["prompts"], "--image", settings["image_path"]]
    assert "--max-new-tokens 256 --temperature 0.01 --top-k 1" in " ".join(words)
    printed = CliRunner().invoke(app, ["migrate", "examples/qwen2vl/inference_qwen2vl_7b.sh"])
    assert printed.exit_code == 0
    assert "start it: tessera generate" in printed.output
    assert not Path("inference_qwen2vl_7b.recipe.yaml").exists()


def test_shards_of_an_inference_script_name_the_folder_that_they_are_of(tmp_path: Path) -> None:
    text = Path("examples/qwen2vl/inference_qwen2vl_7b.sh").read_text()
    job = script(tmp_path, text, LOAD_PATH="ckpt/mm_path/Qwen2-VL-7B-Instruct")
    assert job.start(Path("r.yaml")).startswith("tessera generate ./ckpt/hf_path/Qwen2-VL-7B-Instruct")
    assert outcome(job, "--load").startswith("differs")


def test_an_evaluation_script_scores_its_table() -> None:
    (words,) = commands("examples/qwen2vl/evaluate_qwen2vl_7b.sh")
    assert words == [
        "tessera",
        "eval",
        "ckpt/hf_path/Qwen2-VL-7B-Instruct",
        "--data",
        "./data/AI2D_TEST.tsv",
        "--max-new-tokens",
        "32",
    ]


def test_a_script_that_samples_videos_becomes_commands(tmp_path: Path) -> None:
    (words,) = commands("examples/wan2.1/1.3b/t2v/inference.sh")
    assert words[:3] == ["tessera", "generate", "ckpt/hf_path/Wan2.1-T2V-1.3B-Diffusers"]
    assert "--frames 81 --height 480 --width 832 --steps 50 --guidance 5.0 --solver unipc" in " ".join(words)
    changes = {"prompt": ["a cat", "a dog"], "image": ["a.png", "b.png,c.png"]}
    model = edited(tmp_path, "examples/wan2.1/1.3b/t2v/inference_model.json", changes)
    job = script(tmp_path, f"torchrun inference_sora.py --mm-model {model} --load x/transformer\n")
    first, second = job.start(Path("r.yaml")).splitlines()
    assert "--prompt 'a cat' --image a.png --out" in first
    assert "--image b.png --last-image c.png" in second


def test_a_script_of_features_becomes_a_recipe_and_its_command() -> None:
    folder = Path("ckpt/hf_path/Wan2.1-T2V-1.3B-Diffusers")
    (folder / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "WanTransformer3DModel"]}))
    job = migrate(Path("examples/wan2.1/feature_extract/feature_extraction.sh"))
    assert job.start(Path("r.yaml")) == "tessera data features r.yaml -o ./sora_features"
    assert job.recipe["model"]["path"] == str(folder)
