"""An export is proved before it is published, its record says what it was, and every change to it is found."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import randomize
from safetensors.torch import load_file, save_file
from small_folders import CASES, small_folder
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

import tessera
from tessera.checkpoint.publish import MARK
from tessera.cli.main import app
from tessera.config.run_config import ModelSection
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.inference.export_record import changes_since, read_record
from tessera.models import resolve
from tessera.models.files.exported_config import exported_config
from tessera.models.transformers.library import load_processor
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.text_classes import SIZES, write_text_class
from tests.toys.vision_classes import VOCABULARY

Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
WEIGHTS, RECORD = "model.safetensors", "tessera_export.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the manner of a published folder: fields and files that no family reads, and no record."""
    folder = small_folder("qwen2", tmp_path_factory.mktemp("made"))
    (folder / RECORD).unlink()
    config = json.loads((folder / "config.json").read_text()) | {"max_window_layers": 21, "note_of_makers": "kept"}
    config |= {"torch_dtype": "bfloat16", "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "LICENSE").write_text("Do what you will.")
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tessera.convert(base, tmp_path_factory.mktemp("out") / "export", prove="never")


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return mutate


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors[GATE.replace("gate", "game")] = tensors.pop(GATE)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        text = (folder / "config.json").read_text()
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new))

    return mutate


def flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1000] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-1])


CHANGED = f"{WEIGHTS} has been changed"
# By name: what is done, and what the record tells.
MUTATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "dropped": (weights(lambda t: t.pop(Q)), CHANGED),
    "renamed": (weights(rename), CHANGED),
    "transposed square": (weights(lambda t: t.update({Q: t[Q].T.contiguous()})), CHANGED),
    "one bit": (flip, CHANGED),
    "truncated": (truncate, CHANGED),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "a side file gone": (
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation_config.json is missing",
    ),
    "a template changed": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        "chat_template.jinja has been changed",
    ),
    "a file added": (lambda folder: (folder / "processor_config.json").write_text("{}"), "was not there"),
    "a number of config.json": (
        replaced('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
        "config.json has been changed",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_change_to_an_export_is_found(name: str, exported: Path, tmp_path: Path) -> None:
    mutate, told = MUTATIONS[name]
    folder = shutil.copytree(exported, tmp_path / "copy")
    mutate(folder)
    agreement = tessera.compare(folder, prove="never")
    assert not agreement.complete
    assert told in "\n".join(agreement.problems), agreement.problems


def test_an_export_is_what_was_written(exported: Path, base: Path) -> None:
    agreement = tessera.compare(exported)
    assert agreement.complete, agreement.lines()
    assert [line.split(":")[0] for line in agreement.lines()] == [
        "unchanged since the export",
        "transformers computes the same logits (44 tokens)",
    ]
    for path in base.iterdir():
        if path.name not in ("config.json", WEIGHTS):
            assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
    (exported / "README.md").write_text("mine")  # which nobody reads
    assert tessera.compare(exported, prove="never").complete


def test_a_family_outside_of_the_tree_is_named(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("from dataclasses import replace", "import tessera.models.qwen2 as built_in")
    family = 'SPEC = replace(built_in.SPEC, name="mine", hf_types=())'
    (tmp_path / "family_of_mine.py").write_text("\n".join((*lines, family)))
    monkeypatch.syspath_prepend(tmp_path)
    command = ["compare", str(exported), "--family", "family_of_mine:SPEC"]
    assert "the family mine does not list the model_type" in CliRunner().invoke(app, command).output
    model, _ = tessera.load(exported, family="family_of_mine:SPEC")
    assert model.spec.name == "mine"
    with raises("recipe.cannot-import", "no_such_family"):
        tessera.compare(exported, family="no_such_family:SPEC")


def test_the_record_has_the_files_of_the_folder(base: Path, tmp_path: Path) -> None:
    start = shutil.copytree(base, tmp_path / "snapshots" / "0123abcd")
    model, processor = tessera.load(start)
    parts = (model.module, model.spec, model.config, processor.processor)
    truncate(start)  # a base that was damaged since does not stop an export
    export_folder(*parts, tmp_path / "out", files=start, base=start, prove="never")
    record = read_record(tmp_path / "out")
    assert record is not None
    assert record.files[WEIGHTS] == hashlib.sha256((tmp_path / "out" / WEIGHTS).read_bytes()).hexdigest()
    assert record.base is not None
    assert record.base.endswith("@0123abcd")
    assert str(tmp_path) not in (tmp_path / "out" / RECORD).read_text(), "a path of this machine is private"


def test_a_record_of_an_earlier_version_is_checked_if_it_has_the_hashes_of_all_files(
    exported: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    record = json.loads((copy / MARK).read_text())
    (copy / MARK).write_text(
        json.dumps(record | {"version": 4, "files": {n: {"sha256": h} for n, h in record["files"].items()}})
    )
    before = read_record(copy)
    assert before is not None
    assert changes_since(copy, before) == []
    flip(copy)
    assert changes_since(copy, before) == [CHANGED]
    (copy / MARK).write_text(json.dumps(record | {"version": 3}))
    assert read_record(copy) is None


def swapped(spec: ModelSpec, old: str, new: str, *also: tuple[str, str]) -> ModelSpec:
    """The family with a weight map that writes some tensors under other names, and reads them so."""
    component = spec.main

    def weights(config: Any) -> Any:
        table_of_family = component.weight_map(config)
        table = {old: new, **dict(also)}
        named = [
            replace(r, foreign=f"{r.foreign}".replace(*p)) for r in table_of_family.rules for p in [pair_of(r, table)]
        ]
        return replace(table_of_family, rules=tuple(named))

    def pair_of(rule: Any, table: dict[str, str]) -> tuple[str, str]:
        return next(((a, b) for a, b in table.items() if a in str(rule.foreign)), ("", ""))

    return replace(spec, main=replace(component, weights={"hf": weights}))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ([("gate_proj", "up_proj"), ("up_proj", "gate_proj")], "output.export-differs"),
        ([("post_attention_layernorm", "another_layernorm")], "output.export-differs"),
    ],
)
def test_a_folder_that_transformers_computes_otherwise_is_not_published(
    names: list[tuple[str, str]], error: str, base: Path, tmp_path: Path
) -> None:
    spec, config = resolve(ModelSection(path=base))
    module = spec.main.build(config)
    randomize(module, 1, 0.3)
    assert spec.processor is not None
    processor = spec.processor(config, base)
    wrong = swapped(spec, *names[0], *names[1:])
    with raises(error) as refused:
        export_folder(module, wrong, config, processor, tmp_path / "out", files=base)
    assert "--prove never" in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    export_folder(module, wrong, config, processor, tmp_path / "out", files=base, prove="never")
    assert (tmp_path / "out" / WEIGHTS).is_file()


def test_config_json_keeps_what_no_family_reads(exported: Path, base: Path) -> None:
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (base, exported))
    assert ours == {**theirs, "torch_dtype": "float32"}  # that of the weights
    _, config = resolve(ModelSection(path=base, config={"text.num_hidden_layers": 2, "text.rms_norm_eps": 1e-5}))
    shorter = exported_config(config, theirs, torch.bfloat16)
    assert (shorter["num_hidden_layers"], shorter["rms_norm_eps"], shorter["dtype"]) == (2, 1e-5, "bfloat16")
    assert "layer_types" not in shorter, "a list for each layer of another model"
    assert AutoConfig.for_model(**shorter).num_hidden_layers == 2


def test_what_is_not_proved_is_said(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tessera"):
        bare = shutil.copytree(base, tmp_path / "bare")
        for path in bare.iterdir():
            if path.name not in ("config.json", WEIGHTS):
                path.unlink()
        assert "transformers computes the same logits (16 tokens)" in "\n".join(tessera.compare(bare).lines())
        (bare / "config.json").write_text((bare / "config.json").read_text().replace("Qwen2ForCausalLM", "Nobody"))
        assert (
            tessera.compare(bare).lines()[-1] == "not compared with transformers: transformers has no class ['Nobody']"
        )
        (bare / "config.json").write_text((bare / "config.json").read_text().replace("Nobody", "logging"))
        assert "has no class ['logging']" in tessera.compare(bare).lines()[-1]
    with raises("output.nothing-to-prove"):
        tessera.compare(bare, prove="always")


def test_a_template_that_reads_otherwise_elsewhere_is_told(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    agreement = tessera.compare(folder)
    assert "transformers computes the same logits" in agreement.compared[-1]  # of the tokens that it was trained with
    (told,) = agreement.problems
    assert "chat template gives other tokens in transformers than here, from position 0 on" in told
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    agreement = tessera.compare(folder)
    assert agreement.complete, "what keeps from comparing is no fault"
    assert "not compared with transformers: the chat template of the folder does not render" in agreement.lines()[-1]
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": 7}')
    assert "transformers cannot load this folder" in "".join(tessera.compare(folder).problems)


def test_what_keeps_from_comparing_does_not_stop_an_export(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    spec, config = resolve(ModelSection(path=folder))
    module = spec.main.build(config)
    randomize(module, 1, 0.3)
    assert spec.processor is not None
    processor = spec.processor(config, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system prompt comes first') }}")
    with caplog.at_level(logging.WARNING, logger="tessera"):
        export_folder(module, spec, config, processor, tmp_path / "out", files=folder)
    assert "the export was not compared with transformers: " in caplog.text
    assert (tmp_path / "out" / WEIGHTS).is_file()
    with pytest.raises(TesseraError):
        export_folder(module, spec, config, processor, tmp_path / "other", files=folder, prove="always")


@pytest.mark.parametrize("name", ["Qwen2ForSequenceClassification", "BertForSequenceClassification"])
def test_classifiers_are_compared_without_conversations(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    folder = write_text_class(name, sizes | heads, tmp_path / "model")
    result = CliRunner().invoke(app, ["compare", str(folder)])
    assert result.exit_code == 0, result.output
    assert "transformers computes the same logits (16 tokens)" in result.output


def test_a_folder_of_unknown_conversations_is_not_wrong(tmp_path: Path) -> None:
    folder = write_text_class("LlamaForCausalLM", SIZES, tmp_path / "model")
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace("<|im_", "<|other_").replace("</s>", "<end>"))
    result = CliRunner().invoke(app, ["compare", str(folder)])
    assert result.exit_code == 0, result.output
    assert "not compared with transformers: the tokenizer lacks the special tokens" in result.output
    weights(lambda tensors: tensors.pop(Q))(folder)
    assert not tessera.compare(folder).complete, "a missing tensor is a fault"


def test_weights_that_exist_nowhere_else_are_exported_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "chat", samples=6), tmp_path / "runs", steps=1)
    recipe["checkpoint"] = {"export": True, "at_end": False}
    run = tessera.train(recipe)
    assert "not compared with transformers: prove=never" in capsys.readouterr().err
    assert (run.folder / "hf" / RECORD).is_file()


def test_the_command_line_says_what_is_wrong_by_its_exit_code(exported: Path, base: Path, tmp_path: Path) -> None:
    run = CliRunner()
    assert run.invoke(app, ["compare", str(exported), "--prove", "never"]).exit_code == 0
    folder = shutil.copytree(exported, tmp_path / "copy")
    flip(folder)
    result = run.invoke(app, ["compare", str(folder), "--prove", "never"])
    assert result.exit_code == 1
    assert "wrong: " in result.output
    refused = run.invoke(app, ["convert", str(base), str(tmp_path / "out"), "--prove", "alway"])
    assert isinstance(refused.exception, TesseraError)
    assert "did you mean: always" in str(refused.exception)
    assert not (tmp_path / "out").exists()
    (folder / RECORD).write_text('{"format": "tessera-export", "version": 5}')
    with raises("output.bad-export-record"):
        tessera.compare(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_family_keeps_its_files_and_its_prompts(name: str, tmp_path: Path) -> None:
    base = small_folder(name, tmp_path)
    out = tessera.convert(base, tmp_path / "out", prove="always")
    assert tessera.compare(out, prove="never").complete
    assert {p.name for p in base.iterdir()} == {p.name for p in out.iterdir()}
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    said = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "Red."}]
    tokens = [AutoTokenizer.from_pretrained(folder).apply_chat_template(said) for folder in (base, out)]
    assert tokens[0] == tokens[1]
    assert type(load_processor(base)).__name__ == type(load_processor(out)).__name__
