"""Flags of MindSpeed-MM jobs: every one known, contradictions refused, and the namespace that scripts expect."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import pytest
import torch

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.config_files import ConfigReader, read_job_json, read_job_yaml
from tessera_compat.mindspeed_mm.flags import FLAGS
from tests.errors import raises


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_values_have_megatrons_names_and_defaults() -> None:
    args = parse_args(
        ["--bf16", "--micro-batch-size", "2", "--lr", "1e-5", "--no-masked-softmax-fusion", "--train-iters", "7"]
    )
    assert (args.micro_batch_size, args.global_batch_size, args.lr, args.train_iters) == (2, 2, 1e-5, 7)
    assert args.params_dtype is torch.bfloat16
    assert args.masked_softmax_fusion is False
    assert (args.adam_beta2, args.weight_decay, args.clip_grad, args.seed) == (0.999, 0.01, 1.0, 1234)
    assert set(args.typed) == {"bf16", "micro_batch_size", "lr", "masked_softmax_fusion", "train_iters"}


VALUES = {"int": ["8"], "float": ["0.5"], "str": ["word"], "words": ["a", "b"]}


def test_no_flag_at_all_gives_the_defaults() -> None:
    args = parse_args([])
    assert (args.typed, args.micro_batch_size, args.global_batch_size) == ((), 1, 1)


def test_refused_flags_are_refused_with_their_reasons() -> None:
    refused = [flag for flag in FLAGS.values() if flag.state == "refused" and flag.scope == "training"]
    with raises("job.refused-flags", str(len(refused))) as error:
        parse_args([word for flag in refused for word in (flag.name, *VALUES.get(flag.kind, []))])
    assert all(f"{flag.name}: {flag.note}" in str(error.value) for flag in refused)
    args = parse_args(["--layerzero", "--layerzero-config", "a.yaml"], allow_refused=True)
    assert args.layerzero


def test_flags_of_launchers_and_other_programs_say_where_they_belong() -> None:
    by_note = {flag.note: flag for flag in FLAGS.values() if flag.scope != "training"}
    for note, flag in by_note.items():
        with pytest.raises(TesseraError) as error:
            parse_args([flag.name, *VALUES.get(flag.kind, [])])
        assert note in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--micro-batch-siz 1", "did you mean: --micro-batch-size"),
        ("--bf16 --fp16", "--bf16 and --fp16"),
        ("--tensor-model-parallel-size 0", "allowed: 1 or more"),
        ("--context-parallel-size 0", "1 or more"),
        ("--micro-batch-size 0", "--micro-batch-size 0"),
        ("--eval-iters -1", "0 or more"),
        ("--recompute-num-layers -4", "0 or more"),
        ("--lr-warmup-fraction 7", "0 to 1"),
        ("--load=", "job.empty-flag"),
        ("--use-torch-fsdp2 --use-distributed-optimizer", "both shard"),
        ("--fsdp2-config-path a.yaml", "without --use-torch-fsdp2"),
        ("--train-iters 3 --train-samples 4", "--train-samples"),
        ("--lr 1e-5 --min-lr 1e-4", "larger than --lr"),
        ("--lr-decay-style cosin", "did you mean: cosine"),
        ("--virtual-pipeline-model-parallel-size 2", "needs a pipeline"),
        ("--global-batch-size 3 --micro-batch-size 2", "not a multiple"),
        ("--tensor-model-parallel-size 2", "1 ranks are not a multiple of 2"),
        ("--lr 1 --lr 2", "job.flag-twice"),
        ("--lr fast", "invalid float"),
        ("stray", "job.stray-word"),
        ("--save your path to save --bf16", "job.several-words"),
        ("--mm-model nowhere.json", "no such file"),
    ],
)
def test_bad_command_lines_are_refused(words: str, said: str) -> None:
    with pytest.raises(TesseraError) as error:
        parse_args(words.split())
    assert said in str(error.value)


def test_flags_and_defaults_of_the_user() -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("mine").add_argument("--my-rate", type=float, default=0.5)
        return parser

    args = parse_args(["--my-rate", "0.25"], extra_args_provider=add, args_defaults={"dataloader_type": "external"})
    assert (args.my_rate, args.dataloader_type, args.extra) == (0.25, "external", ("my_rate",))


def test_json_files_are_attributes(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"text_decoder": {"num_layers": 4}, "encoders": [{"a": 1}]}))
    args = parse_args(["--mm-model", str(tmp_path / "model.json")])
    model = copy.deepcopy(args.mm.model)
    model.text_decoder.num_layers = 5
    assert args.mm.model.text_decoder.num_layers == 4
    assert model.to_dict() == {"text_decoder": {"num_layers": 5}, "encoders": [{"a": 1}]}
    assert model.encoders[0].a == 1
    assert "text_decoder" in model
    assert getattr(model, "image_encoder", None) is None
    with raises("job.unknown-key", "text_decoder"):
        _ = model.text_decode
    with pytest.raises(AttributeError, match="micro_batch_size"):
        _ = args.micro_batch


def test_yaml_job_becomes_flags(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "SAVE: &SAVE out\n"
        "gpt_args:\n  lr: 1e-5\n  save: *SAVE\n  bf16: true\n  use_flash_attn: false\n  micro_batch_size: 2\n"
        "lora_args: {lora_r: 4, lora_target_modules: 'q_proj,v_proj'}\n"
        "data: {dataset_param: {}}\nmodel: {model_id: qwen3_vl}\n"
    )
    args = parse_args([str(job), "--train-iters", "3"])
    assert (args.lr, args.save, args.bf16, args.use_flash_attn, args.train_iters) == (1e-5, "out", True, False, 3)
    assert (args.lora_r, args.lora_target_modules) == (4, ["q_proj", "v_proj"])
    assert args.mm.model.model_id == "qwen3_vl"


def test_yaml_of_jobs_has_anchors_merge_keys_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base: &base {eps: 1e-8, fused: true}\nother:\n  <<: *base\n  eps: 2E-6\n")
    assert read_job_yaml(file)["other"] == {"eps": 2e-6, "fused": True}
    for text, said in (
        ("a: &x 1\nb: &x 2\n", "job.invalid-yaml"),
        ("a: 1\na: 2\n", "job.invalid-yaml"),
        ("[1]", "job.not-a-mapping"),
        ("a: !!python/object:os.system x\n", "job.invalid-yaml"),
    ):
        file.write_text(text)
        with raises(said):
            read_job_yaml(file)
    file.write_text('{"a": 1, "a": 2}')
    with raises("job.key-twice"):
        read_job_json(file)
    file.write_text('{"a": 1,}')
    with raises("job.invalid-json", "a.yaml:1"):
        read_job_json(file)


def test_readers_compare_by_content() -> None:
    assert ConfigReader({"a": {"b": 1}}) == ConfigReader({"a": {"b": 1}})
    assert ConfigReader({"a": 1}) != ConfigReader({"a": 2})


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"])
    assert ended.value.code == 0
    assert "\n  --micro-batch-size\n" in capsys.readouterr().out
