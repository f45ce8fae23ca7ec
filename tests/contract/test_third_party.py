"""Families that run other people's classes: built without weights, weights in and out, numbers of the class itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import tessera
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.pattern import select
from tessera.config.run_config import ModelSection
from tessera.core.batch import IGNORE, Batch
from tessera.inference.load import load
from tessera.inference.weight_source import fill_from
from tessera.models import resolve
from tessera.models.transformers import TransformersBuilder, TransformersConfig
from tessera.models.transformers.hub import choose_class, find_class, published_class
from tessera.runtime.modules import computed_buffers, without_weights
from tessera.tasks.returns_loss import ReturnsLossTask
from tessera.tasks.transformers import TransformersTask
from tests.errors import raises
from tests.task_parts import sum_and_count
from tests.toys.hf_folders import CASES, TEXT, new_model, write_folder
from tests.toys.keyword_rows import KeywordRows

ROOT = Path(__file__).parents[2]
NAMES = sorted(CASES)
PLAIN = "tests.toys.own_models:PlainNet"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    return {name: write_folder(name, base / name) for name in CASES}


def rows(name: str, count: int = 3) -> Batch:
    return KeywordRows(CASES[name].rows, 0).batch(range(count))


def upstream(name: str, folder: Path) -> Any:
    return getattr(transformers, CASES[name].class_name).from_pretrained(folder, attn_implementation="sdpa")


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


# ---------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", NAMES)
def test_built_without_weights_but_with_the_tables_the_class_computes(name: str, folders: dict[str, Path]) -> None:
    model = TransformersBuilder.from_folder(folders[name])
    with torch.device("meta"):  # as a run builds it
        module = model.build()
    assert type(module) is getattr(transformers, CASES[name].class_name)
    assert all(parameter.is_meta for parameter in module.parameters())
    expected = dict(upstream(name, folders[name]).named_buffers())
    buffers = computed_buffers(module)
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[key], value) for key, value in expected.items())
    assert module.config._attn_implementation == "sdpa"
    paths = [path for path, _ in module.named_modules() if path]
    assert list(model.plan().blocks) == select(CASES[name].blocks, paths, "test")
    assert set(model.plan().tensor) == {path for path, _ in module.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_names_in_files_are_those_that_the_library_writes(name: str, folders: dict[str, Path]) -> None:
    model = TransformersBuilder.from_folder(folders[name])
    table = model.weights()
    ours = [path for path, _ in model.build().named_parameters()]
    written = set()
    for path in ours:
        _, (foreign,) = table.rule_for(path) or pytest.fail(path)
        written.add(foreign)
        assert table.canonical(foreign) == foreign
        assert table.canonical(path) == foreign  # files of newer versions may use the module's own spelling
    assert written == names_in(folders[name])
    assert table.rule_for("nobody.knows.this") is None


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_class(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    batch = rows(name)
    theirs = upstream(name, folders[name]).train()
    out = theirs(**batch.tensors)
    out.loss.backward()

    module = filled(name, folders[name])
    task = TransformersTask()
    inputs = task.inputs(batch)
    total, count = sum_and_count(task, module(inputs), inputs)
    (total / count).backward()
    assert (total / count).item() == pytest.approx(out.loss.item(), rel=1e-6)
    expected = dict(theirs.named_parameters())
    for path, parameter in module.named_parameters():
        # `from_pretrained` forgets that Whisper's sinusoids are frozen; the class as it is constructed does not.
        assert parameter.requires_grad == (path != "model.encoder.embed_positions.weight")
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[path].grad, rtol=1e-5, atol=1e-7)


def filled(name: str, folder: Path) -> nn.Module:
    spec, config = resolve(ModelSection(family="transformers", path=folder))
    module = load_into(spec.main.build(config), spec.main.weight_map(config), folder)  # type: ignore[misc]
    return module.train()


def load_into(module: nn.Module, table: Any, folder: Path) -> nn.Module:
    from tessera.parallel.apply import allocate
    from tessera.runtime.modules import put_back_buffers

    buffers = computed_buffers(module)
    allocate(module, torch.device("cpu"))
    put_back_buffers(module, buffers)
    fill_from(folder, model_tensors(module), table, tied_names(module))
    return module


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen3" else [pytest.mark.slow]) for name in NAMES]
)
def test_what_is_trained_goes_back_to_the_library(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    run = tessera.train(
        {
            "name": name,
            "out": str(tmp_path),
            "model": {"family": "transformers", "path": str(folders[name])},
            "data": {"kind": "tests.toys.keyword_rows", "options": {"make": CASES[name].rows}},
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
            "optim": {"lr": 1e-2, "schedule": {"kind": "constant"}},
            "checkpoint": {"export": True, "prove": "never"},
        }
    )
    exported = run.folder / "hf"
    assert names_in(exported) == names_in(folders[name])
    assert json.loads((exported / "tokenizer_config.json").read_text()) == {"model_max_length": 24}
    before, after = json.loads((folders[name] / "config.json").read_text()), (exported / "config.json").read_text()
    assert json.loads(after)["architectures"] == before["architectures"]

    batch = rows(name)
    inputs = TransformersTask().inputs(batch)
    theirs = upstream(name, exported).eval()
    assert {p.dtype for p in theirs.parameters()} == {torch.float32}
    model, _ = load(run.folder, device="cpu")
    with torch.no_grad():
        expected = theirs(**batch.tensors).logits
        assert torch.equal(model(inputs).logits, expected)
        assert not torch.equal(upstream(name, folders[name]).eval()(**batch.tensors).logits, expected)


@pytest.mark.parametrize(
    ("kind", "labels", "named"),
    [
        pytest.param("Qwen3", 1, True, marks=pytest.mark.slow),
        pytest.param("Qwen3", 3, True, marks=pytest.mark.slow),
        pytest.param("Qwen3", 3, False, marks=pytest.mark.slow),
        ("Gemma", 1, False),
    ],
)
def test_a_classifier_is_trained_by_its_own_loss(kind: str, labels: int, named: bool, tmp_path: Path) -> None:
    """`named`: model.family says that the library's class is meant, also where a family here would read the folder."""
    config = getattr(transformers, f"{kind}Config")(**TEXT, head_dim=8, pad_token_id=0, num_labels=labels)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    model.save_pretrained(tmp_path / "folder")
    rows = "rated_words" if labels == 1 else "sorted_words"
    settings: dict[str, Any] = {
        "name": "classes",
        "out": str(tmp_path),
        "model": {"path": str(tmp_path / "folder"), **({"family": "transformers"} if named else {})},
        "data": {"kind": "tests.toys.keyword_rows", "options": {"make": rows}, "shuffle": False},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 2, "device": "cpu", "task": "returns_loss"},
        "optim": {"lr": 1e-2, "schedule": {"kind": "constant"}},
        "checkpoint": {"export": True},
    }
    run = tessera.train(settings)
    batch = KeywordRows(rows, 0).batch(range(4))
    with torch.no_grad():
        expected = model(**batch.tensors).loss
    assert run.metrics[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    trained = type(model).from_pretrained(run.folder / "hf")
    assert not torch.equal(trained.score.weight, model.score.weight)
    loaded, _ = load(run.folder, device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, trained.eval()(**batch.tensors).logits)
    with raises("task.label-shape") as caught:
        tessera.train({**settings, "name": "other", "train": {**settings["train"], "task": "transformers"}})
    assert "returns_loss" in str(caught.value.fix)


def test_fresh_weights_are_the_class_s_own_and_a_function_of_the_seed(folders: dict[str, Path]) -> None:
    config = TransformersConfig(folder=folders["whisper"])
    fresh = dict(TransformersBuilder(config).fresh().named_parameters())
    key = "model.encoder.embed_positions.weight"  # sinusoids, which no random rule would give
    expected = transformers.models.whisper.modeling_whisper.sinusoids(*fresh[key].shape)
    assert torch.equal(fresh[key], expected)
    assert not fresh[key].requires_grad


# ---------------------------------------------------------------------------------------------- classes


def test_classes_are_found_by_ids_import_paths_and_names(folders: dict[str, Path]) -> None:
    hf = json.loads((folders["qwen3"] / "config.json").read_text())
    assert choose_class(hf, None) is transformers.Qwen3ForCausalLM
    assert choose_class(hf, "Qwen3ForSequenceClassification") is transformers.Qwen3ForSequenceClassification
    assert choose_class(hf, "AutoModelForTokenClassification") is transformers.Qwen3ForTokenClassification
    assert choose_class(hf, "tests.toys.adapted_qwen3:AdaptedQwen3").__name__ == "AdaptedQwen3"
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert choose_class(llama, None) is transformers.LlamaForCausalLM


def test_an_adapted_class_reads_and_writes_the_files_of_the_library_s_class(folders: dict[str, Path]) -> None:
    config = TransformersConfig.model_validate(
        {"folder": folders["qwen3"], "class": "tests.toys.adapted_qwen3:AdaptedQwen3"}
    )
    assert config.to_hf()["architectures"] == ["Qwen3ForCausalLM"]
    model = TransformersBuilder(config)
    assert published_class(model.model_class) is transformers.Qwen3ForCausalLM
    assert model.weights().rule_for("model.norm.weight") is not None


@pytest.mark.slow
def test_mistakes_about_classes() -> None:
    with raises("model.unknown-class") as caught:
        choose_class({"model_type": "x", "architectures": ["Qwen3ForCausalLMM"]}, None)
    assert caught.value.nearest == "Qwen3ForCausalLM"
    with raises("model.class-not-named"):
        choose_class({"model_type": "x", "architectures": ["os:system"]}, None)  # a folder names no import path
    with raises("model.class-not-subclass", "PreTrainedModel"):
        find_class(PLAIN)
    with raises("model.no-class-for-type", "model_type"):
        choose_class({"model_type": "whisper"}, "AutoModelForObjectDetection")
    with raises("environment.cannot-open"):
        resolve(ModelSection(family="transformers", config={"folder": "nowhere"}))
    hf = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "nonsense"}
    with raises("model.class-cannot-build"):
        TransformersBuilder(TransformersConfig(hf=hf)).build()


def test_weights_in_another_form_are_refused_by_name() -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 32}
    config = transformers.Qwen3MoeConfig(**fields).to_dict()
    with raises("weights.class-renames-weights"):
        TransformersBuilder(TransformersConfig(hf={**config, "architectures": ["Qwen3MoeForCausalLM"]})).weights()


# ---------------------------------------------------------------------------------------------- any module


def module_family(**config: Any) -> tuple[Any, Any]:
    return resolve(ModelSection(family="module", config=config))


def test_a_plain_module_keeps_its_tables_and_is_called_by_keywords() -> None:
    spec, config = module_family(**{"class": PLAIN, "arguments": {"depth": 1}})
    with torch.device("meta"):
        first, second = spec.main.build(config), spec.main.build(config)
    assert all(parameter.is_meta for parameter in first.parameters())
    assert torch.equal(first.window, torch.hann_window(64) + 0.5)
    assert torch.equal(first.features, second.features)  # drawn at random, and yet every rank has the same
    assert first.features.std() > 0
    real = spec.main.load(config)
    batch = KeywordRows("digits", 0).batch([0, 1])
    assert torch.equal(real(**batch.tensors), without_hooks(real, batch))


def without_hooks(module: nn.Module, batch: Batch) -> torch.Tensor:
    return type(module).forward(module, batch["pixels"], batch["labels"])


def test_building_leaves_no_trace() -> None:
    before = torch.random.get_rng_state()
    without_weights(lambda: nn.Linear(3, 3))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not nn.Linear(3, 3).weight.is_meta


def test_a_folder_never_names_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"class": PLAIN, "arguments": {"depth": 5}}))
    spec, config = resolve(ModelSection(family="module", path=tmp_path))
    with raises("model.class-missing"):
        spec.main.build(config)
    spec, config = resolve(ModelSection(family="module", path=tmp_path, config={"class": PLAIN}))
    assert len(spec.main.build(config).blocks) == 5  # what the weights need is taken from where they lie


@pytest.mark.parametrize(
    ("config", "error", "near"),
    [
        ({"class": "tests.toys.own_modelz:PlainNet"}, "recipe.cannot-import tests.toys.own_modelz", None),
        ({"class": "tests.toys.own_models:PlaneNet"}, "recipe.no-attribute PlaneNet", "PlainNet"),
        ({"class": "tests.toys.own_data:keyed"}, "model.class-not-subclass", None),
        ({"class": "PlainNet"}, "recipe.not-an-import-path", None),
        ({"class": PLAIN, "arguments": {"widht": 3}}, "recipe.wrong-options", "width"),
    ],
)
def test_mistakes_in_a_recipe(config: dict[str, Any], error: str, near: str | None) -> None:
    spec, built = module_family(**config)
    with raises(error) as caught:
        spec.main.build(built)
    assert caught.value.nearest == near


def test_a_tensor_that_forward_does_not_take_is_named() -> None:
    spec, config = module_family(**{"class": PLAIN})
    module = spec.main.build(config)
    with raises("data.not-an-argument") as caught:
        module(Batch({"pixles": torch.zeros(1, 64), "labels": torch.zeros(1)}))
    assert caught.value.nearest == "pixels"


def test_the_wrong_key_of_a_model_section_names_the_right_one() -> None:
    with raises("recipe.unknown-key") as caught:
        module_family(clas=PLAIN)
    assert caught.value.nearest == "class"


# ---------------------------------------------------------------------------------------------- the page


@pytest.mark.slow  # 25 s of commands; what they do is tested above in one process
def test_the_page_s_own_example_runs(tmp_path: Path) -> None:
    """Files and commands are taken from the page, so that it cannot rot."""
    text = (ROOT / "docs" / "how-to" / "bring-your-own-model.md").read_text(encoding="utf-8")
    files = re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in files] == ["shapes/net.py", "shapes/rows.py", "recipe.yaml"]
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for command in commands.splitlines():
        setting, program, *words = command.split()
        assert (setting, program) == ("PYTHONPATH=.", "tessera")
        # Where the package under test lies, as if it were installed.
        path = os.pathsep.join([".", str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "tessera.cli.main", *words],
            cwd=tmp_path,
            # Its two ranks need no two accelerators: where there is one, it is hidden from them.
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            timeout=120,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "shapes"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 32
    assert losses[-1] < 0.5 * losses[0]
    assert names_in(run / "hf") >= {"inlet.weight", "blocks.1.weight", "head.bias"}
    assert "window" not in names_in(run / "hf")


# ---------------------------------------------------------------------------------------------- returns_loss


def test_a_mean_becomes_a_sum_over_what_it_is_a_mean_of() -> None:
    labels = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 3]])
    batch = Batch({"labels": labels}, sample_ids=("a", "b"))
    mean, task = torch.tensor(0.5), ReturnsLossTask()
    assert [float(v) for v in sum_and_count(task, mean, batch)] == [1.0, 2.0]  # samples
    assert [float(v) for v in sum_and_count(task, {"loss": mean, "count": 8}, batch)] == [4.0, 8.0]
    counted = ReturnsLossTask(count_labels="labels")
    assert [float(v) for v in sum_and_count(counted, mean, batch)] == [1.5, 3.0]
    total = ReturnsLossTask(reduction="sum")
    assert [float(v) for v in sum_and_count(total, {"loss": mean, "count": torch.tensor(8)}, batch)] == [0.5, 8.0]
    output = transformers.modeling_outputs.CausalLMOutput(loss=mean)
    assert [float(v) for v in sum_and_count(counted, output, batch)] == [1.5, 3.0]
    nothing = sum_and_count(task, {"loss": torch.tensor(float("nan")), "count": 0}, batch)
    assert [float(v) for v in nothing] == [0.0, 0.0]


def test_what_is_no_loss_is_described() -> None:
    batch = Batch({"x": torch.zeros(2)})
    with raises("task.no-loss-returned"):
        ReturnsLossTask().losses(torch.zeros(2, 3), batch)
    with raises("task.no-loss-returned"):
        ReturnsLossTask().losses({"logits": torch.zeros(2, 3)}, batch)
    with raises("recipe.wrong-value"):
        ReturnsLossTask(reduction="average")  # type: ignore[arg-type]
    with raises("task.no-labels-to-count"):
        ReturnsLossTask(count_labels="labels").losses(torch.tensor(1.0), batch)


def test_the_language_task_needs_labels_and_logits_that_fit() -> None:
    task = TransformersTask()
    with raises("task.no-labels"):
        task.inputs(Batch({"input_ids": torch.zeros(1, 3)}))
    inputs = task.inputs(Batch({"labels": torch.zeros(1, 3, dtype=torch.long)}))
    with raises("task.label-shape"):
        task.losses(transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(1, 2, 5)), inputs)


def test_new_models_differ_by_seed() -> None:
    first, second = (next(new_model("qwen3", seed).parameters()) for seed in (0, 1))
    assert not torch.equal(first, second)
