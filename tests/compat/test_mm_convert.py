"""The command lines of MindSpeed-MM's converter, as its users type them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from parity import randomize
from small_folders import small_folder
from test_megatron_forms import hub_weights

import tessera
from tessera.checkpoint.legacy.dcp import read_dcp
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera_compat.mindspeed_mm.convert import main, run
from tessera_compat.mindspeed_mm.convert_table import CONVERTERS
from tests.dist.spawn import fork_context
from tests.errors import raises

# As the guide (seed 001) has them, but that one size of the model stands for both.
HF_TO_MM = r"""
mm-convert  Qwen2VLConverter hf_to_mm \
  --cfg.mm_dir "ckpt/mm_path/Qwen2-VL-7B-Instruct" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2-VL-7B-Instruct" \
  --cfg.parallel_config.llm_pp_layers [[28]] \
  --cfg.parallel_config.vit_pp_layers [[32]] \
  --cfg.parallel_config.tp_size 1
"""
MM_TO_HF = r"""
mm-convert  Qwen2VLConverter mm_to_hf \
  --cfg.save_hf_dir "ckpt/mm_to_hf/Qwen2-VL-7B-Instruct" \
  --cfg.mm_dir "ckpt/mm_path/Qwen2-VL-7B-Instruct" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2-VL-7B-Instruct" \
  --cfg.parallel_config.llm_pp_layers [1,10,10,7] \
  --cfg.parallel_config.vit_pp_layers [32,0,0,0] \
  --cfg.parallel_config.tp_size 1
"""
RESPLIT = """mm-convert Qwen2VLConverter resplit
  --cfg.source_dir ckpt/first --cfg.target_dir ckpt/mm_path/Qwen2-VL-7B-Instruct
  --cfg.source_parallel_config.llm_pp_layers [28] --cfg.source_parallel_config.vit_pp_layers [32]
  --cfg.source_parallel_config.tp_size 1
  --cfg.target_parallel_config.llm_pp_layers [1,10,10,7] --cfg.target_parallel_config.vit_pp_layers [32,0,0,0]
  --cfg.target_parallel_config.tp_size 1"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of as many layers as the guide's, and very narrow."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 28, "mrope_section": [1, 1, 2]}
    config = {
        "text": {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2},
        "vision": {"depth": 32, "embed_dim": 8, "num_heads": 1, "patch_size": 4},
    }
    spec, resolved = resolve(ModelSection(family="qwen2_vl", preset="quickstart", config=config))
    module = spec.main.build(resolved)
    randomize(module, 0, 0.3)
    target = tmp_path_factory.mktemp("deep") / "hf"
    export_folder(module, spec, resolved, None, target, prove="never")
    return target


@pytest.fixture
def folder(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that the guide names."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(deep, tmp_path / "ckpt/hf_path/Qwen2-VL-7B-Instruct"))


def typed(line: str) -> list[str]:
    command, *words = shlex.split(line.replace("\\\n", " "))
    assert command == "mm-convert"
    return words


def test_the_lines_of_the_guide_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(typed(HF_TO_MM))
    assert Path("ckpt/mm_path/Qwen2-VL-7B-Instruct/release/mp_rank_00/model_optim_rng.pt").is_file()
    assert Path("ckpt/mm_path/Qwen2-VL-7B-Instruct/latest_checkpointed_iteration.txt").read_text() == "release"
    with raises("megatron.other-layout"):
        run(typed(MM_TO_HF))
    Path("ckpt/mm_path/Qwen2-VL-7B-Instruct").rename("ckpt/first")
    main(typed(RESPLIT))
    ranks = {path.name for path in Path("ckpt/mm_path/Qwen2-VL-7B-Instruct/release").iterdir()}
    assert ranks == {f"mp_rank_00_{stage:03d}" for stage in range(4)}
    main(typed(MM_TO_HF))
    assert "wrote ckpt/mm_to_hf/Qwen2-VL-7B-Instruct" in capsys.readouterr().out
    written, expected = hub_weights(Path("ckpt/mm_to_hf/Qwen2-VL-7B-Instruct")), hub_weights(folder)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def convert_at(words: list[str], place: str) -> None:
    os.chdir(place)
    run(words)


@pytest.mark.slow
def test_a_killed_conversion_is_completed_by_the_same_line(folder: Path, tmp_path: Path) -> None:
    target, whole = tmp_path / "ckpt/mm_path/Qwen2-VL-7B-Instruct", tmp_path / "whole"
    convert_at(typed(HF_TO_MM), str(tmp_path))
    target.rename(whole)
    for delay in (0.0, 0.05, 0.2):
        process = fork_context().Process(target=convert_at, args=(typed(HF_TO_MM), str(tmp_path)))
        process.start()
        while not list(target.parent.glob(".staging-*")) and process.exitcode is None:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.join()
    convert_at(typed(HF_TO_MM), str(tmp_path))
    files = [{path.relative_to(top): path.read_bytes() for path in top.rglob("*.*")} for top in (whole, target)]
    assert files[0] == files[1]
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_dcp_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = small_folder("qwen3_vl experts", tmp_path / "made")
    run(["Qwen3VLConverter", "hf_to_dcp", f"--hf_dir={folder}", "--dcp_dir=dcp"])
    names = read_dcp(Path("dcp/release"))
    assert names.keys() == {f"model.model.{name}" for name in hub_weights(folder)}
    (stacked,) = (t for n, t in names.items() if n.endswith("layers.0.mlp.experts.down_proj"))
    assert len(stacked.shape) == 2
    run(["Qwen3VLConverter", "dcp_to_hf", "--load_dir", "dcp", "--save_dir", "back", "--model_assets_dir", str(folder)])
    written, expected = hub_weights(Path("back")), hub_weights(folder)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    checked = tessera.compare("back", prove="never")
    assert checked.complete, checked.problems
    assert checked.compared[0].startswith("unchanged since the export")  # its record was written


def test_options_come_from_files_and_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed(HF_TO_MM)
    run([*words, "--print_config=skip_default"])
    Path("job.yaml").write_text(capsys.readouterr().out)
    run([*words, "--print_config=comments,skip_null"])
    told = capsys.readouterr().out
    assert "# cfg.parallel_config.tp_size: tensor ranks" in told
    assert yaml.safe_load(told)["cfg"]["parallel_config"]["ep_size"] == 1
    cfg = yaml.safe_load(Path("job.yaml").read_text())["cfg"]
    assert cfg == {
        "mm_dir": "ckpt/mm_path/Qwen2-VL-7B-Instruct",
        "hf_config": {"hf_dir": "ckpt/hf_path/Qwen2-VL-7B-Instruct"},
        "parallel_config": {"llm_pp_layers": [[28]], "vit_pp_layers": [[32]], "tp_size": 1},
    }
    Path("all.yaml").write_text(yaml.safe_dump({"Qwen2VLConverter": {"hf_to_mm": {"cfg": cfg}}}))
    Path("cfg.yaml").write_text(yaml.safe_dump(cfg))

    def settled(*words: str) -> dict[str, Any]:
        run([*words, "--print_config=skip_default"])
        settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)["cfg"]
        return settings

    assert settled(*A_JOB, "--config", "job.yaml", "--cfg.mm_dir", "third") == {**cfg, "mm_dir": "third"}
    assert settled("--config", "all.yaml", *A_JOB) == cfg
    assert settled(*A_JOB, "--cfg", "cfg.yaml") == cfg
    assert (
        settled(*A_JOB, "--cfg.parallel_config", json.dumps(cfg["parallel_config"]))["parallel_config"]["tp_size"] == 1
    )
    assert settled(*A_JOB, "--cfg.mm_dir", "a", "--config=job.yaml") == cfg, "what stands later wins"
    monkeypatch.setenv("MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__MM_DIR", "elsewhere")
    monkeypatch.setenv("MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__PARALLEL_CONFIG__LLM_PP_LAYERS", "[[1,3]]")
    assert settled(*A_JOB, "--config", "job.yaml") == cfg
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    assert settled(*A_JOB)["parallel_config"] == {"llm_pp_layers": [[1, 3]]}
    assert settled(*A_JOB, "--cfg.mm_dir", "fourth")["mm_dir"] == "fourth"
    monkeypatch.setenv("MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__MM_DIRR", "x")
    with raises("job.converter-variable", "CFG__MM_DIR"):
        settled(*A_JOB)


# Every converter and method of MindSpeed-MM (the reference, section 2f), with those that did nothing or were broken.
KNOWN = """
Qwen2VLConverter hf_to_mm mm_to_hf resplit
Qwen2_5_VLConverter hf_to_mm mm_to_hf resplit lora_hf_to_mm lora_mm_to_hf -hf_to_mm_ldt -hf_to_mm_dcp
Qwen2_5_OmniConverter hf_to_mm mm_to_hf resplit
InternVLConverter hf_to_mm mm_to_hf resplit
Qwen3VLMegatronConverter hf_to_mm mm_to_hf resplit
VideoAlignConverter -hf_to_mm -mm_to_hf -resplit
GlmConverter -hf_to_mm -mm_to_hf -resplit
DeepSeekVLConverter -hf_to_mm -mm_to_hf -resplit
Qwen3VLConverter hf_to_dcp dcp_to_hf lora_hf_to_dcp merge_mm_lora_dcp_weight_to_base_hf -hf_to_mm -mm_to_hf -resplit
Qwen35Converter hf_to_dcp dcp_to_hf -hf_to_mm -mm_to_hf -resplit
GenericDCPConverter hf_to_dcp dcp_to_hf -hf_to_mm -mm_to_hf -resplit
Mistral3Converter hf_to_dcp dcp_to_hf lora_hf_to_dcp merge_mm_lora_dcp_weight_to_base_hf
ExpertMergeDcpConverter hf_to_dcp dcp_to_hf
Qwen3TTSConverter -dcp_to_hf -hf_to_dcp
MOSSTTSConverter -dcp_to_hf -hf_to_dcp
WanConverter hf_to_mm mm_to_hf resplit -lora_hf_to_mm merge_lora_to_base -layerzero_to_mm -mm_to_dcp
VACEConverter -hf_to_mm -mm_to_hf -hf_diffusers_to_mm -mm_to_hf_diffusers
HunyuanVideoConverter source_to_mm hf_to_mm mm_to_hf resplit -layerzero_to_mm merge_lora_to_base -t2v_text_encoder
OpenSoraPlanConverter -hf_to_mm -source_to_mm -resplit -vae_convert
CogVideoConverter hf_to_mm mm_to_hf source_to_mm resplit -layerzero_to_mm merge_lora_to_base
LuminaConverter -hf_to_mm -mm_to_hf
BagelConverter -hf_to_mm
OpenSoraConverter -hf_to_mm
StepVideoConverter -hf_to_mm
"""


def test_every_method_works_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    for line in KNOWN.split("\n")[1:-1]:
        converter, *methods = line.split()
        run([converter])
        listed = capsys.readouterr().out
        for method in methods:
            name = method.lstrip("-")
            assert f"  {name}  " in listed, converter
            run([converter, "--help", name] if method == "hf_to_mm" else [converter, name, "-h"])
            described = capsys.readouterr().out
            assert ("refused: " in described) == method.startswith("-"), (converter, name)
            with pytest.raises(TesseraError) as raised:  # also the constructor's options before the method
                run([converter, "--version", "t2v", name] if method.startswith("-") else [converter, name])
            said = str(raised.value)
            assert ("missing: --" in said) != method.startswith("-"), said
    run([])
    overview = capsys.readouterr().out
    assert all(f"  {name}: " in overview for name in CONVERTERS)
    assert {*CONVERTERS} == {line.split()[0] for line in KNOWN.split("\n")[1:-1]} | {"moe_expert"}


A_JOB = ["Qwen2VLConverter", "hf_to_mm"]
LISTS = ["--cfg.parallel_config.llm_pp_layers", "--cfg.parallel_config.vit_pp_layers"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Qwen2VLConvertr", "hf_to_mm"], "did you mean: Qwen2VLConverter"),
        (["Qwen2VLConverter", "hf_to_m"], "did you mean: hf_to_mm"),
        ([*A_JOB, "--cfg.mm_dirr", "x"], "did you mean: --cfg.mm_dir"),
        ([*A_JOB, "--cfg.paralel_config.tp_size", "x"], "did you mean: --cfg.parallel_config.tp_size"),
        ([*A_JOB, "--cfg.mm_dir", "x"], "are missing: --cfg.hf_config.hf_dir, "),
        ([*A_JOB, "--cfg.save_vit_only", "true"], "single encoder"),
        ([*A_JOB, "--cfg.common_model_config.enable_canonical_hf_struct", "true"], "fused structure"),
        ([*A_JOB, "--cfg.llm_hf_config.hf_dir", "x"], "cannot be in another folder"),
        ([*A_JOB, "--mm_dir", "x"], "did you mean: --cfg.mm_dir"),
        ([*A_JOB, "--cfg.mm_dir"], "no value"),
        ([*A_JOB, "more"], "unexpected word 'more'"),
        ([*A_JOB, "--cfg.parallel_config.tp_size", "two"], "must be a number of ranks, not 'two'"),
        ([*A_JOB, "--cfg.parallel_config.tp_size", "-1"], "must be a number of ranks, not -1"),
        ([*A_JOB, "--cfg.parallel_config.tp_size", ""], "the value is empty"),
        ([*A_JOB, "--cfg.trust_remote_code", "1"], "must be true or false"),
        ([*A_JOB, LISTS[0], "[28]"], "must be a list of lists"),
        ([*A_JOB, LISTS[0], "[[28],28]"], "must be a list of lists"),
        ([*A_JOB, LISTS[0], "[[]]"], "must be a list of lists"),
        ([*A_JOB, LISTS[0], "[[2.5]]"], "must be a list of lists"),
        ([*A_JOB, LISTS[1], "[["], "parallel_config.vit_pp_layers"),
        (["Qwen2VLConverter", "mm_to_hf", LISTS[0], "[[28]]"], "must be a list of numbers"),
        ([*A_JOB, "--print_config=coments"], "did you mean: comments"),
        ([*A_JOB, "--config", "absent.yaml"], "absent.yaml"),
        ([*A_JOB, "--cfg.parallel_config", "{tp_sise: 1}"], "did you mean: --cfg.parallel_config.tp_size"),
        (["moe_expert", "--style", "merg", "--hf_dir", "x", "--save_dir", "y"], "did you mean: merge"),
        (["moe_expert", "merge"], "unexpected word 'merge'"),
        (["moe_expert", "--style=merge", "--hf_dir", "x" * 300, "--save_dir", "y"], "too long"),
    ],
)
def test_wrong_words_end_with_two_and_name_the_right_ones(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_wrong_family_and_the_wrong_lists_are_refused(folder: Path) -> None:
    words = typed(HF_TO_MM)
    with raises("job.converter-family", "qwen2_5_vl"):
        run(["Qwen2_5_VLConverter", *words[1:]])
    flat = [word.replace("[[", "[").replace("]]", "]") for word in words]
    with raises("job.converter-option-value"):
        run(flat)
    assert not Path("ckpt/mm_path").exists()


def test_the_help_says_something_of_every_converter(capsys: pytest.CaptureFixture[str]) -> None:
    run([])
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert all(line.partition(": ")[2] for line in listed), listed
    assert "  moe_expert: (no method) --style merge, --style split" in listed
