"""Every verb from Python and from the shell, on one tiny run: train, load, generate, evaluate, convert, report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import tessera
from tessera.cli.main import app, main
from tessera.errors import TesseraError
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tessera.Run:
    recipe = chat_recipe(data, tmp_path_factory.mktemp("runs"), eval_every=3)
    recipe["checkpoint"]["export"] = True
    recipe["log"]["trackers"] = ["tensorboard"]
    recipe["data"]["workers"] = "auto"  # as by default: pictures are decoded in a process of their own
    return tessera.train(recipe)


def ask(picture: Path, question: str = "Say red.") -> list[dict[str, object]]:
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def test_the_run_folder_holds_everything(run: tessera.Run) -> None:
    names = {path.name for path in run.folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "report.html", "checkpoints", "hf", "ledger", "tensorboard"} <= names
    assert run.checkpoint == run.folder / "checkpoints" / "step-00000006"
    assert [row["step"] for row in run.metrics if row["kind"] == "eval"] == [3, 6]
    rates = [key for key in run.metrics[-2] if key.endswith("_per_s")]
    assert {"tokens_per_s", "images_per_s", "samples_per_s"} <= set(rates)


def test_run_checkpoint_and_folder_are_the_same_model(run: tessera.Run, data: Path) -> None:
    assert run.checkpoint is not None
    answers, logits = [], []
    for place in (run.folder, run.checkpoint, run.folder / "hf"):
        model, processor = tessera.load(place, device="cpu")
        batch = processor(ask(data / "pictures/1-0.png"))
        with torch.no_grad():
            logits.append(model(batch, logits=True)["logits"])
        answers.append(model.generate(batch, max_new_tokens=6))
    assert torch.equal(logits[0], logits[1])
    assert torch.allclose(logits[0], logits[2], atol=1e-6)
    assert answers[0] == answers[1] == answers[2]
    assert isinstance(answers[0], str)


def test_a_run_starts_from_a_run_and_from_a_folder(run: tessera.Run, data: Path, tmp_path: Path) -> None:
    for number, origin in enumerate((run.folder, run.folder / "hf")):
        recipe = chat_recipe(data, tmp_path / str(number), steps=1)
        recipe["model"] = {"path": str(origin), "tokenizer": str(data / "tokenizer")}
        recipe["optim"]["lr"] = 0.0
        begun = tessera.train(recipe)
        first = begun.metrics[0]["loss"]
        assert first == pytest.approx(run.metrics[-2]["loss"], rel=0.2)
        assert first < run.metrics[0]["loss"] - 0.1


@pytest.mark.slow
def test_a_run_outlives_the_folder_it_began_from(run: tessera.Run, data: Path, tmp_path: Path) -> None:
    folder = tessera.convert(run.folder, tmp_path / "start", prove="never")
    recipe = chat_recipe(data, tmp_path, steps=2)
    recipe["model"] = {"path": str(folder)}
    begun = tessera.train(recipe)
    folder.rename(tmp_path / "gone")
    assert tessera.resume(begun.folder, {"train.steps": 3}).checkpoint == begun.folder / "checkpoints/step-00000003"
    tessera.load(begun.folder)


def test_evaluate_writes_answers_and_the_report_shows_them(run: tessera.Run) -> None:
    (result,) = tessera.evaluate(run.folder, max_new_tokens=4).results
    assert result.questions == 6
    assert set(result.categories["images"]) == {"text only", "1 image", "2 images"}
    assert result.answers.parent == run.folder / "eval" / "step-00000006"
    page = (run.folder / "report.html").read_text()
    assert "Held-out answers" in page
    assert "data:image/png;base64" in page
    assert not re.search(r"(?:src|href)=[\"']https?:", page), "the report needs nothing from elsewhere"


def test_transformers_agrees_with_the_export(run: tessera.Run, data: Path) -> None:
    agreement = tessera.compare(run.folder / "hf", data / "train.jsonl", max_new_tokens=5)
    assert len(agreement.answers) == 12
    assert agreement.complete, agreement.lines()


def test_both_faces_have_the_same_verbs() -> None:
    """Commands that serve, print settings, write a job for a scheduler or look at data sets are for the shell, and
    those of other packages have their own Python face. `demo` is `tessera data demo`, `generate_answers` is
    `generate --data`, and `parity` is `compare A B`.
    """
    callbacks = [command.callback for command in app.registered_commands if command.callback]
    verbs = {callback.__name__ for callback in callbacks if callback.__module__.startswith("tessera.")}
    spelled = {"eval": "evaluate"}
    assert {spelled.get(verb, verb) for verb in verbs} - {"launch", "serve"} <= set(tessera.__all__)
    no_verbs = {"GenerationModel", "Run", "TesseraError", "demo", "load", "pipeline", "dry_run", "generate_answers"}
    no_verbs |= {"speaker", "answer_speaker"}
    no_verbs.add("parity")
    assert set(tessera.__all__) - no_verbs <= {spelled.get(verb, verb) for verb in verbs}
    for name in tessera.__all__:
        assert callable(getattr(tessera, name)), name


def test_the_package_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "tessera", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tessera {tessera.__version__} (Python")
    wrong = subprocess.run([sys.executable, "-m", "tessera", "trian"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "trian" in wrong.stderr


@pytest.mark.slow
def test_folders_are_named_by_text_or_by_path(run: tessera.Run, data: Path, tmp_path: Path) -> None:
    folder, picture = str(run.folder), data / "pictures/1-0.png"
    assert tessera.report(folder) == tessera.report(run.folder) == run.folder / "report.html"
    told: list[str] = []
    options = {"images": [str(picture)], "max_new_tokens": 3, "device": "cpu"}
    answer = tessera.generate(folder, "Say red.", on_text=told.append, **options)  # type: ignore[arg-type]
    assert answer == "".join(told) == tessera.generate(run.folder, "Say red.", **options)  # type: ignore[arg-type]
    exported = tessera.convert(folder, str(tmp_path / "out"), prove="never")
    assert exported == tmp_path / "out"
    rows = str(data / "train.jsonl")
    assert len(tessera.compare(str(exported), rows, max_samples=2, max_new_tokens=2, prove="never").answers) == 2
    evaluation = tessera.evaluate(folder, data=rows, max_samples=2, max_new_tokens=2, out=str(tmp_path / "scores"))
    assert evaluation.results[0].questions == 2
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(chat_recipe(data, tmp_path, steps=1)))
    assert tessera.plan(str(recipe), world=2).figures() == tessera.plan(recipe, world=2).figures()
    assert tessera.preflight(str(recipe))[0].startswith("1 ranks ")
    again = tessera.train(str(recipe))
    assert tessera.resume(str(again.folder), {"train.steps": 2}).folder == again.folder
    for verb in (tessera.report, tessera.resume, tessera.load, tessera.evaluate):
        with pytest.raises(TesseraError):
            verb(str(tmp_path / "nothing"))  # type: ignore[operator]


def shell(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tessera.cli.main", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_generate_streams_from_the_shell(run: tessera.Run, data: Path, tmp_path: Path) -> None:
    picture = data / "pictures/1-0.png"
    said = shell("generate", run.folder, "Say red.", "--image", picture, "--max-new-tokens", 6, "--device", "cpu")
    model, processor = tessera.load(run.folder, device="cpu")
    assert said == f"{model.generate(processor(ask(picture)), max_new_tokens=6)}\n"
    memory = Image.open(picture)
    talk = [{"role": "user", "content": [{"type": "image", "image": memory}, {"type": "text", "text": "Say red."}]}]
    assert said == f"{model.generate(processor(talk), max_new_tokens=6)}\n"


def test_plan_config_and_convert_from_the_shell(
    run: tessera.Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program without a process of its own: each would import torch again."""

    def said(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tessera", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr().out
        assert not ended.value.code, out
        return out

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(chat_recipe(data, tmp_path)))
    capsys.readouterr()
    assert "8 = 1 replicated x 8 sharded" in said("plan", recipe, "--world", 8)
    assert "lr: 0.5" in said("config", "show", recipe, "optim.lr=0.5")
    assert "properties" in json.loads(said("config", "schema"))
    said("convert", run.folder, tmp_path / "out", "--dtype", "bfloat16")
    model, _ = tessera.load(tmp_path / "out")
    assert next(model.module.parameters()).dtype == torch.bfloat16
