"""Each mistake a user can make gets a clear error with exit code 2, or a counted skip; nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from tessera.cli.main import main
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


@pytest.fixture
def recipe(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(chat_recipe(data, tmp_path / "runs", steps=3, global_batch=1)))
    return path


def tessera(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str]:
    """The command line, in this process: exit code and everything it said."""
    monkeypatch.setattr(sys, "argv", ["tessera", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *words: tessera(capsys, monkeypatch, *words)


def test_versions(run: Any) -> None:
    code, said = run("--version")
    assert code == 0
    assert said.startswith("tessera ")
    assert f"torch {torch.__version__.split('+')[0]}" in said


@pytest.mark.parametrize("words", ["plann", "train", "plan --wrold 2", "train x.yaml --nproc 0"])
def test_a_wrong_use_of_the_command_line_has_a_code(run: Any, words: str) -> None:
    code, said = run(*words.split())
    assert code == 2
    assert said.splitlines()[-1].split() == ["code:", "environment.wrong-usage"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_screen_that_cannot_be_written_is_an_error_with_a_code(recipe: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "tessera", "config", "show", str(recipe)]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].split() == ["code:", "output.disk-full"]


def test_a_recipe_that_the_system_does_not_read(run: Any) -> None:
    code, said = run("config", "show", "/proc/self/mem")
    assert code == 2
    assert said.splitlines()[-1].split() == ["code:", "recipe.cannot-open"]


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-m", "tessera", "--help"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_misspelt_option_of_a_task(run: Any, recipe: Path) -> None:
    code, said = run("train", recipe, "train.task=dpo", "train.task_options.bta=1")
    assert code == 2
    assert "did you mean: beta" in said


def test_where_nothing_can_be_written(run: Any, recipe: Path, data: Path) -> None:
    inside = recipe / "figures.json"  # of what is no folder
    for words in (
        ("plan", recipe, "--json", inside),
        ("plan", recipe, "--json", recipe.parent),
        ("data", "doctor", data / "train.jsonl", "--html", inside),
        ("data", "doctor", data / "train.jsonl", "--json", "/proc/nowhere/found.json"),
    ):
        code, said = run(*words)
        assert code == 2, said
        assert "where:   --" in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1", "did you mean lr"),
        ("train.steps=soon", "train.steps"),
        ("data.train.0.path=missing.jsonl", "missing.jsonl\n"),
        ("data.train.0.path=README.mdd", "did you mean: README.md"),
        ("model.tokenizer=nowhere", "no such folder: nowhere"),
        ("model.path=nowhere", "nowhere"),
        ("train.device=gpu", "unknown device"),
        ("data.kind=chats", "did you mean: chat"),
        ("train.task=langage", "did you mean: language"),
        ("train.task_options.colour=red", "'colour'"),
        ("data.train_on=[asistant]", "asistant"),
        ("data.processor.min_pixel=3", "min_pixels"),
        ("data.processor.train_on=[user]", "data.train_on"),
        ("data.length=8", "data.no-usable-sample"),
        ("parallel.recompute=[text.layer]", "did you mean: text.layers"),
    ],
)
def test_mistakes_in_a_recipe(run: Any, recipe: Path, override: str, words: str) -> None:
    code, said = run("train", recipe, override)
    assert code == 2
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("nproc", "overrides", "words"),
    [
        (3, ["parallel.tp=2"], "did you mean: pp=1 cp=1 tp=3"),
        (4, ["parallel.tp=4"], "heads"),
        (2, ["parallel.pp=2", "parallel.layers={vision: [2, 0], text: [1, 3]}"], "adds up to 4 layers, text has 2"),
        (4, ["parallel.pp=4", "parallel.virtual=2"], "8 stages, and the model has 4 layers"),
        (
            4,
            ["parallel.pp=4", "parallel.schedule=1f1b", "train.global_batch=2"],
            "and a step has 2 micro-batches",
        ),
        (2, ["parallel.cp=2", "parallel.encoders={audio: {tp: 1}}"], "no encoder 'audio'"),
        (2, ["parallel.ep=2"], "the model has none"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_any_rank_starts(
    run: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch, nproc: int, overrides: list[str], words: str
) -> None:
    def nobody(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("tessera.cli.launch.elastic_launch", nobody)
    code, said = run("train", recipe, "--nproc", nproc, *overrides)
    assert code == 2
    assert words in said
    assert not (recipe.parent / "runs").exists()


def test_missing_recipe(run: Any, recipe: Path) -> None:
    code, said = run("train", recipe.with_name("recipy.yaml"))
    assert code == 2
    assert "did you mean: recipe.yaml" in said


def test_bad_samples_are_counted_listed_and_skipped(run: Any, tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "data", samples=9)
    pictures = data / "pictures"
    (pictures / "empty.png").write_bytes(b"")
    whole = (pictures / "1-0.png").read_bytes()
    (pictures / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (pictures / "noise.png").write_bytes(b"no picture at all" * 20)
    bomb = bytearray(whole)
    bomb[16:24] = (30000).to_bytes(4, "big") * 2  # width and height in the PNG header, and its checksum
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    (pictures / "bomb.png").write_bytes(bomb)
    Image.new("RGB", (9, 9)).save(tmp_path / "secret.png")

    def row(name: str, picture: str, question: str = "What?", answer: str = "red") -> dict[str, Any]:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        talk = [{"role": "user", "content": content}]
        return {"id": name, "messages": [*talk, *([{"role": "assistant", "content": answer}] if answer else [])]}

    bad = {
        "missing": row("missing", "pictures/none.png"),
        "empty": row("empty", "pictures/empty.png"),
        "noise": row("noise", "pictures/noise.png"),
        "bomb": row("bomb", "pictures/bomb.png"),
        "outside": row("outside", str(tmp_path / "secret.png")),
        "climbing": row("climbing", "../secret.png"),
        "url": row("url", "http://127.0.0.1/x.png"),
        "silent": row("silent", "pictures/1-0.png", answer=""),
        "truncated": row("truncated", "pictures/truncated.png"),
    }
    with (data / "train.jsonl").open("a") as file:
        for item in bad.values():
            file.write(json.dumps(item) + "\n")
        file.write("{not json\n")
    recipe = chat_recipe(data, tmp_path / "runs", steps=4)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    code, said = run("train", path)
    assert code == 2
    assert f"tessera data doctor {data / 'train.jsonl'}" in said
    code, said = run("train", path, "data.max_bad_share=1")
    assert code == 0, said
    listed = [json.loads(line) for line in (tmp_path / "runs/chat/quarantine.jsonl").read_text().splitlines()]
    codes = {item["id"]: item["code"] for item in listed}
    assert set(bad) <= set(codes)
    assert len(codes) == len(bad) + 1
    assert codes["bomb"] == "media.too-many-pixels"
    assert codes["outside"] in ("media.outside-root", "media.path-leads-up")
    assert f"skipped samples: {len(codes)} (" in said

    code, said = run("train", path, "data.on_bad_sample=fail", "name=strict")
    assert code == 2
    assert "data.on_bad_sample=skip" in said


def damaged(data: Path, name: str, copies: int) -> Path:
    """Write rows whose images have a good header and are cut off behind it, which only decoding shows."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    with_images = [row for row in rows if '"image"' in json.dumps(row)][:4]
    for picture in sorted((data / "pictures").iterdir()):
        (data / "torn").mkdir(exist_ok=True)
        (data / "torn" / picture.name).write_bytes(picture.read_bytes()[:60])
    torn = json.loads(json.dumps(with_images).replace("pictures/", "torn/"))
    rows = [{**row, "id": f"{copy}-{at}"} for copy in range(copies) for at, row in enumerate(torn)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (data / name).write_text(text)
    return data / name


def test_a_run_that_cannot_use_what_it_reads_ends_and_so_does_one_without_a_held_out_sample(
    run: Any, tmp_path: Path
) -> None:
    data = write_chat_set(tmp_path / "data", samples=9)
    recipe = chat_recipe(data, tmp_path / "runs", steps=12, eval_every=1)
    path = tmp_path / "recipe.yaml"
    torn = damaged(data, "torn.jsonl", copies=8)
    path.write_text(yaml.safe_dump(recipe))
    code, said = run("train", path, f"data.train={torn}", "data.eval=[]", "train.eval_every=0", "guard.coverage=off")
    assert code == 2
    assert "data.no-usable-sample" in said
    assert 5 <= len((tmp_path / "runs/chat/quarantine.jsonl").read_text().splitlines()) <= 32
    code, said = run("train", path, f"data.eval={torn}", "name=held-out")
    assert code == 2
    assert "where:   data.eval" in said


def test_more_placeholders_than_pictures(run: Any, data: Path, tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": "<image><image> x"}, {"from": "gpt", "value": "y"}]}]
    rows[0]["images"] = ["pictures/1-0.png"]  # type: ignore[assignment]
    (tmp_path / "odd.json").write_text(json.dumps(rows))
    recipe = chat_recipe(data, tmp_path / "runs")
    recipe["data"]["train"] = [{"path": str(tmp_path / "odd.json"), "root": str(data)}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, said = run("train", tmp_path / "recipe.yaml")
    assert code == 2
    assert "2" in said
    assert "1" in said


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_as_weights_is_never_opened(run: Any, recipe: Path, tmp_path: Path) -> None:
    from tessera.models.qwen2_vl import SPEC
    from tessera.models.qwen2_vl.config import Qwen2VLConfig

    folder = tmp_path / "weights"
    folder.mkdir()
    config = Qwen2VLConfig.model_validate(SPEC.presets["quickstart"])
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    override = ("model.path=" + str(folder), "model.family=null", "model.preset=null", "model.config={}")
    code, said = run("train", recipe, *override)
    assert code == 2
    assert "pickle" in said
    code, said = run("generate", folder / "pytorch_model.bin", "hello")
    assert code == 2
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_one_before_is_used(run: Any, recipe: Path, tmp_path: Path) -> None:
    assert run("train", recipe, "checkpoint.every=1")[0] == 0
    checkpoints = tmp_path / "runs/chat/checkpoints"
    shard = checkpoints / "step-00000003/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    code, said = run("resume", tmp_path / "runs/chat", "train.steps=4")
    assert code == 0
    assert "step-00000003 is damaged" in said
    assert "resumed from" in said
    assert "step-00000002" in said
    assert run("generate", tmp_path / "runs/chat", "hello", "--max-new-tokens", "3")[0] == 0


def test_a_port_in_use(run: Any, recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = run("train", recipe, "--nproc", "2", "--port", taken.getsockname()[1])
    assert code == 2
    assert "is in use" in said


def test_not_a_run(run: Any, tmp_path: Path) -> None:
    for words in (("resume", tmp_path), ("report", tmp_path), ("eval", tmp_path), ("generate", tmp_path, "x")):
        code, said = run(*words)
        assert code == 2, said
        assert "Traceback" not in said


def test_a_run_that_is_not_there_is_told_the_runs_that_are(run: Any, tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "config.yaml").write_text("name: digits\n")
    for words in (
        ("resume", tmp_path / "digit"),
        ("report", tmp_path / "digit"),
        ("generate", tmp_path / "digit", "x"),
    ):
        code, said = run(*words)
        assert code == 2, said
        assert f"did you mean: {tmp_path / 'digits'}" in said
        assert f"allowed: {tmp_path / 'digits'}" in said


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond this size fail with an error, as they do on a full disk."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
def test_a_full_disk_during_save_loses_nothing(run: Any, recipe: Path, tmp_path: Path) -> None:
    assert run("train", recipe, "train.steps=1")[0] == 0
    with largest_file(100_000):
        code, said = run("resume", tmp_path / "runs/chat", "train.steps=3")
    assert code == 2, said
    assert "could not be written" in said
    assert "Traceback" not in said
    checkpoints = tmp_path / "runs/chat/checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-00000001"]
    code, said = run("resume", tmp_path / "runs/chat", "train.steps=3")
    assert code == 0
    assert "step-00000001" in said


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_saves_and_leaves_cleanly(nproc: int, recipe: Path, tmp_path: Path) -> None:
    words = ("train", recipe, "train.steps=100000", "checkpoint.every=0", "log.every=1", f"train.global_batch={nproc}")
    words = (*words, "--nproc", nproc)
    job = subprocess.Popen(
        [sys.executable, "-m", "tessera.cli.main", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    metrics = tmp_path / "runs/chat/metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert job.poll() is None, job.communicate()[0]  # it ended before it was asked to
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    saved = [p for p in (tmp_path / "runs/chat/checkpoints").iterdir() if p.name.startswith("step-")]
    assert len(saved) == 1, said
    assert "SIGTERM" in said
