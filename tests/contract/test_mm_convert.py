"""The command lines of MindSpeed-MM's converter, as its users type them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from small_folders import small_folder
from test_megatron_forms import hub_weights, layers_of

from tessera.checkpoint.legacy.dcp import read_dcp
from tessera.compat.mindspeed_mm.convert import CONVERTERS, main, run
from tessera.core.errors import TesseraError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that the guide names, with a small model in them."""
    monkeypatch.chdir(tmp_path)
    made = small_folder("qwen2_vl", tmp_path / "made")
    (tmp_path / "ckpt/hf_path").mkdir(parents=True)
    made.rename(tmp_path / "ckpt/hf_path/Qwen2-VL-2B-Instruct")
    return tmp_path / "ckpt/hf_path/Qwen2-VL-2B-Instruct"


HF_TO_MM = """Qwen2VLConverter hf_to_mm
  --cfg.mm_dir "ckpt/mm_path/Qwen2-VL-2B-Instruct"
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2-VL-2B-Instruct"
  --cfg.parallel_config.llm_pp_layers [[{text}]]
  --cfg.parallel_config.vit_pp_layers [[{vision}]]
  --cfg.parallel_config.tp_size 1"""
RESPLIT = """Qwen2VLConverter resplit
  --cfg.source_dir ckpt/mm_path/Qwen2-VL-2B-Instruct --cfg.target_dir ckpt/mm_path/again
  --cfg.source_parallel_config.llm_pp_layers [{text}] --cfg.source_parallel_config.vit_pp_layers [{vision}]
  --cfg.source_parallel_config.tp_size 1
  --cfg.target_parallel_config.llm_pp_layers [1,{rest}] --cfg.target_parallel_config.vit_pp_layers [{vision},0]
  --cfg.target_parallel_config.tp_size 2"""
MM_TO_HF = """Qwen2VLConverter mm_to_hf
  --cfg.save_hf_dir "ckpt/mm_to_hf/Qwen2-VL-2B-Instruct"
  --cfg.mm_dir "ckpt/mm_path/again"
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2-VL-2B-Instruct"
  --cfg.parallel_config.llm_pp_layers [1,{rest}]
  --cfg.parallel_config.vit_pp_layers [{vision},0]
  --cfg.parallel_config.tp_size 2"""


def typed(line: str, folder: Path) -> list[str]:
    vision, text = layers_of(folder)
    for key, number in (("vision", vision), ("text", text), ("rest", text - 1)):
        line = line.replace("{" + key + "}", str(number))
    return shlex.split(line)


def test_the_lines_of_the_guide_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (HF_TO_MM, RESPLIT, MM_TO_HF):
        main(typed(line, folder))
    assert "wrote ckpt/mm_to_hf/Qwen2-VL-2B-Instruct" in capsys.readouterr().out
    assert Path("ckpt/mm_path/Qwen2-VL-2B-Instruct/release/mp_rank_00/model_optim_rng.pt").is_file()
    assert Path("ckpt/mm_path/again/release/mp_rank_01_001/model_optim_rng.pt").is_file()
    found, expected = hub_weights(Path("ckpt/mm_to_hf/Qwen2-VL-2B-Instruct")), hub_weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("converter", "name"), [("GenericDCPConverter", "qwen2_vl"), ("Qwen3VLConverter", "qwen3_vl experts")]
)
def test_dcp_and_back(converter: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = small_folder(name, tmp_path / "made")
    run([converter, "hf_to_dcp", f"--hf_dir={folder}", "--dcp_dir=dcp"])
    names = read_dcp(Path("dcp/release"))
    prefix = "model.model." if converter == "Qwen3VLConverter" else "model."
    assert names.keys() == {prefix + name for name in hub_weights(folder)}
    if "experts" in name:
        (stacked,) = (t for n, t in names.items() if n.endswith("layers.0.mlp.experts.down_proj"))
        assert len(stacked.shape) == 2
    words = ["--load_dir", "dcp/release", "--save_dir", "back", "--model_assets_dir", str(folder)]
    run([converter, "dcp_to_hf", *words])
    found, expected = hub_weights(Path("back")), hub_weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_options_come_from_files_and_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vision, text = layers_of(folder)
    run([*typed(HF_TO_MM, folder), "--print_config"])
    Path("job.yaml").write_text(capsys.readouterr().out)
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__MM_DIR", "elsewhere")
    assert run(["Qwen2VLConverter", "hf_to_mm", "--config", "job.yaml", "--cfg.mm_dir", "third"]) == Path("third")
    lists = [f"--cfg.parallel_config.{k}_pp_layers=[[{n}]]" for k, n in (("llm", text), ("vit", vision))]
    assert run(["Qwen2VLConverter", "hf_to_mm", f"--cfg.hf_config.hf_dir={folder}", *lists]) == Path("elsewhere")


def test_every_converter_works_or_says_why_not(folder: Path) -> None:
    for name, converter in CONVERTERS.items():
        assert bool(converter.methods) != (converter.refused is not None), name
        if converter.refused:
            with pytest.raises(TesseraError, match="here"):
                run([name, "hf_to_mm"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Qwen2VLConvertr", "hf_to_mm"], "Qwen2VLConverter"),
        (["Qwen2VLConverter", "hf_to_m"], "hf_to_mm"),
        (["Qwen2VLConverter", "hf_to_mm", "--cfg.mm_dirr", "x"], "mm_dir"),
        (["Qwen2VLConverter", "hf_to_mm", "--cfg.mm_dir", "x"], "missing"),
        (["Qwen2VLConverter", "hf_to_mm", "--cfg.save_vit_only", "true"], "encoder alone"),
        (["Qwen2VLConverter", "hf_to_mm", "--mm_dir", "x"], "--cfg."),
        (["Qwen2VLConverter", "hf_to_mm", "--cfg.mm_dir"], "no value"),
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
    words = typed(HF_TO_MM, folder)
    with pytest.raises(TesseraError, match="is for qwen2_5_vl"):
        run(["Qwen2_5_VLConverter", *words[1:]])
    flat = [word.replace("[[", "[").replace("]]", "]") for word in words]
    with pytest.raises(TesseraError, match="list of lists"):
        run(flat)
    run(words)
    with pytest.raises(TesseraError, match="divided as"):
        run([word.replace("again", "Qwen2-VL-2B-Instruct") for word in typed(MM_TO_HF, folder)])
    assert not Path("ckpt/mm_to_hf").exists()
