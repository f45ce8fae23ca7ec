"""Models and data sets by their name on a hub, from a server of this machine: pinned, verified, off line, by ranks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NOBODY

from tessera.cli.main import main
from tessera.config.hub_ids import HubId, find_hub_id, hub_spelling, parse_hub_id, plain_hub_id
from tessera.config.reader import dump_yaml
from tessera.config.run_config import SourceSection, load_config
from tessera.data.sources.source import open_source
from tessera.evaluation.benchmark import BenchmarkQuestion
from tessera.evaluation.tasks.load import open_task
from tessera.hub.config import local_model, local_source, with_local_folders
from tessera.hub.download import Wanted, downloaded, fetch
from tessera.hub.files import data_files, model_files
from tessera.lora.peft import base_of
from tessera.tools.download import download
from tessera.weights.layouts import folder_layout
from tests.errors import raises
from tests.toys.hub_server import HubServer, hub_server

WEIGHTS = bytes(range(256)) * 40
MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": WEIGHTS,
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"# A model",
}
ROW = json.dumps({"query": "Hi", "response": "Hello"}).encode() + b"\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def model(name: str = "org/tiny") -> HubId:
    return HubId("hf", "model", name)


# ---------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", HubId("hf", "model", "org/name")),
        ("ms://Qwen/Qwen2.5-VL-3B", HubId("ms", "model", "Qwen/Qwen2.5-VL-3B")),
        ("hf://org/name@v1.0", HubId("hf", "model", "org/name", "v1.0")),
        ("hf://org/name@refs/pr/3/sub", HubId("hf", "model", "org/name", "refs/pr/3", "sub")),
        ("hf://org/name@refs%2Fpr%2F3", HubId("hf", "model", "org/name", "refs/pr/3")),
        (
            "hf://datasets/org/name/data/train-*.parquet",
            HubId("hf", "dataset", "org/name", None, "data/train-*.parquet"),
        ),
    ],
)
def test_ids_are_read_and_written(text: str, expected: HubId) -> None:
    assert parse_hub_id(text, "model", "here") == expected
    assert parse_hub_id(Path(text), "model", "here") == expected  # a path has lost a slash
    assert parse_hub_id(str(expected), "model", "here") == expected
    assert hub_spelling(Path(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf://name",
        "hf://org/../x",
        "hf://org/name/../../x",
        "hf://org/na me",
        "hf://-o/n",
        "hf://org/name@",
        "hf://org/name?x=1",
        "hf://org/name\\x",
    ],
)
def test_names_that_no_hub_has_are_refused(text: str) -> None:
    with raises("hub.not-a-name"):
        parse_hub_id(text, "model", "here")


def test_org_and_name_are_a_path_where_they_can_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert plain_hub_id(Path("org/name"), "model") == HubId("hf", "model", "org/name")
    for path in (
        "models/typo",
        "name",
        "a/b/c",
        "/org/name",
        "./name",
        "../name",
        "org/rows.jsonl",
        "org/m.safetensors",
    ):
        assert plain_hub_id(Path(path), "model") is None, path
    assert find_hub_id(tmp_path / "models", "model", "here") is None


# ---------------------------------------------------------------------------------------------- files


def test_weights_are_taken_once_and_code_never() -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"]
    names += ["model.safetensors.index.json", "config.json", "model.py", "model.bin", "../x.json", ".hidden.json"]
    stored = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    texts = ["model.safetensors.index.json", "config.json"]
    assert model_files(names, model(), weights=True) == [*stored, *texts]
    assert model_files(names, model(), weights=False) == texts
    assert model_files(names, model(), weights=True, include=["*.json"]) == texts
    pipeline = [
        "model_index.json",
        "whole.safetensors",
        "vae/a.safetensors",
        "vae/a.fp16.safetensors",
        "vae/b.fp16.safetensors",
    ]
    assert model_files(pipeline, model(), weights=True) == [
        "model_index.json",
        "vae/a.safetensors",
        "vae/b.fp16.safetensors",
    ]
    with raises("hub.only-pickles"):
        model_files(["config.json", "pytorch_model.bin"], model(), weights=True)
    with raises("hub.no-such-files", ".bin"):
        model_files(["config.json", "pytorch_model.bin"], model(), weights=True, include=["*.bin"])


def chosen(names: list[str], split: Any = "train", inside: str = "") -> tuple[list[str], str]:
    chosen_files = data_files(names, HubId("hf", "dataset", "org/set", None, inside), split)
    return list(chosen_files.files), chosen_files.path


def test_the_files_of_a_split_are_found_by_their_names() -> None:
    parquet = [f"data/{split}-0000{i}-of-00002.parquet" for split in ("train", "test", "validation") for i in (0, 1)]
    assert chosen([*parquet, "README.md", "load.py"]) == (parquet[:2], "data/train-0000*-of-00002.parquet")
    assert chosen(parquet, "eval") == (parquet[4:], "data/validation-0000*-of-00002.parquet")
    assert chosen(["train.jsonl", "img/a.jpg", "dataset_infos.json"]) == (["train.jsonl", "img/a.jpg"], "train.jsonl")
    assert chosen(["metadata.jsonl", "a.jpg", "b.py"]) == (["metadata.jsonl", "a.jpg"], "")
    assert chosen(["train/metadata.csv", "train/a.jpg", "test/b.jpg"]) == (
        ["train/metadata.csv", "train/a.jpg"],
        "train",
    )
    shards = ["a-000.tar", "a-001.tar"]
    assert chosen(shards, inside="a-{000..001}.tar") == (shards, "a-{000..001}.tar")
    assert chosen(["x/1.jpg", "x/1.txt", "y/2.jpg"], inside="x") == (["x/1.jpg", "x/1.txt"], "x")


def test_sets_that_do_not_say_what_to_read_are_refused() -> None:
    with raises("hub.several-datasets") as raised:
        chosen(["en/train.jsonl", "de/train.jsonl"])
    assert raised.value.allowed is not None
    with raises("hub.unknown-split"):
        chosen(["rows.jsonl"], "eval")
    with raises("hub.no-such-files"):
        chosen(["set.py", "README.md"])
    with raises("hub.no-such-files"):
        chosen(["train.jsonl"], inside="*.parquet")


# ---------------------------------------------------------------------------------------------- download


def test_a_model_is_downloaded_pinned_and_verified(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    repository = hub.add("org/tiny", dict(MODEL))
    fetched = fetch(model(), "model.path")
    assert str(fetched.id) == f"hf://org/tiny@{repository.commit}"
    names = sorted(path.name for path in fetched.folder.iterdir())
    assert names == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    assert "4 files, 10.3 kB" in capsys.readouterr().err
    hub.requests.clear()
    assert fetch(fetched.id, "model.path") == fetched  # a commit never changes: nobody is asked
    assert hub.requests == []
    repository.files["config.json"] = b'{"model_type": "qwen2"}'
    again = fetch(model(), "model.path")
    assert again.id != fetched.id
    assert hub.downloads() == ["config.json"]  # what has not changed is not fetched again


def test_adapters_find_their_model_where_it_was_downloaded(hub: HubServer, tmp_path: Path) -> None:
    adapters = tmp_path / "run/adapter"
    adapters.mkdir(parents=True)
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/tiny"}))
    with raises("adapter.base-missing", "org/tiny") as raised:
        base_of(adapters, downloaded)
    assert "`tessera download hf://org/tiny` fetches it" in str(raised.value.fix)
    assert "--like MODEL" in str(raised.value.fix)
    hub.add("org/tiny", dict(MODEL))
    local_model("hf://org/tiny", weights=False)
    with raises("adapter.base-missing"):  # what a plan fetched is no model
        base_of(adapters, downloaded)
    fetched = fetch(model(), "model.path")
    hub.requests.clear()
    assert base_of(adapters, downloaded) == fetched.path
    assert hub.requests == []
    file.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": ""}))
    with raises("adapter.base-unnamed") as raised:
        base_of(adapters, downloaded)
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    with raises("adapter.base-unnamed") as raised:
        base_of(adapters, downloaded)
    assert f"tessera convert {tmp_path / 'run'} OUT" in str(raised.value.fix)


def test_a_path_that_may_have_been_meant_as_a_model_of_a_hub_is_told_how_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()  # so that Qwen/Small is a path
    for path, said in (("Qwen/Small", "hf://Qwen/Small"), ("gpt2", "hf://org/name"), ("/data/model", None)):
        with raises("weights.folder-missing") as raised:
            folder_layout(Path(path)).config()
        assert ("hf://" in str(raised.value.fix)) == (said is not None)
        assert said is None or said in str(raised.value.fix)


def test_a_plan_needs_no_weights(hub: HubServer) -> None:
    hub.add("org/tiny", dict(MODEL))
    folder = local_model("hf://org/tiny", weights=False)
    assert not (folder / "model.safetensors").exists()
    assert (local_model("org/tiny") / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fault", "error"),
    [("altered", "hub.bytes-differ SHA-256"), ("error", "hub.download-broke-off 500")],
)
def test_a_broken_download_is_told_and_goes_on(hub: HubServer, fault: str, error: str) -> None:
    repository = hub.add("org/tiny", dict(MODEL), faults={"model.safetensors": fault})
    with raises(error):
        fetch(model(), "model.path")
    repository.faults.clear()
    hub.requests.clear()
    assert (fetch(model(), "model.path").path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads() == ["model.safetensors"]


def test_who_may_not_have_it_is_told_why(hub: HubServer) -> None:
    hub.add("org/gated", dict(MODEL), gated=True)
    hub.add("org/private", dict(MODEL), private=True)
    for name, said, fix in (
        ("org/gated", "hub.terms-not-accepted", "hf auth login"),
        ("org/private", "hub.no-such-repository org/private", "HF_TOKEN"),
        ("org/none", "hub.no-such-repository org/none", "a folder that exists"),
    ):
        with raises(said) as raised:
            fetch(model(name), "model.path")
        assert fix in str(raised.value.fix)
        assert raised.value.where == "model.path"
    hub.add("org/tiny", dict(MODEL))
    with raises("hub.no-such-revision", "v9"):
        fetch(model("org/tiny").at("v9"), "model.path")


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "endpoint"])
def test_off_line_a_copy_serves_and_its_absence_is_explained(
    hub: HubServer, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", dict(MODEL))
    hub.add("datasets/org/set", {"train.jsonl": ROW})
    fetched = fetch(model(), "model.path")
    rows = local_source(SourceSection(path=Path("hf://org/set")), "train")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1") if how == "HF_HUB_OFFLINE" else monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    hub.requests.clear()
    capsys.readouterr()
    assert fetch(model(), "model.path").folder == fetched.folder
    assert "could not be reached" in capsys.readouterr().err
    assert local_source(SourceSection(path=Path("hf://org/set")), "train") == rows
    with raises("hub.not-reachable") as raised:
        fetch(model("org/other"), "model.path")
    assert "tessera download hf://org/other --to FOLDER" in str(raised.value.fix)
    assert "model.path=FOLDER" in str(raised.value.fix)
    with raises("hub.not-reachable") as raised:  # files of a benchmark, which `tessera eval --data` reads
        fetch(
            parse_hub_id("hf://org/bench", "dataset", "--tasks"),
            "--tasks",
            wanted=Wanted(include=("data/test-*.parquet",)),
        )
    assert 'org/bench --data --include "data/test-*.parquet" --to FOLDER' in str(raised.value.fix)
    assert str(raised.value.fix).endswith("add --data FOLDER")
    assert hub.requests == []


def test_a_copy_without_all_its_weights_does_not_serve(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    parts = {"model-1.safetensors": WEIGHTS, "model-2.safetensors": WEIGHTS[1:], "model.safetensors.index.json": index}
    hub.add("org/tiny", {"config.json": b"{}", **parts})
    folder = fetch(model(), "model.path").folder
    for note in (folder.parents[2] / ".tessera").glob("*.json"):  # as if another program had fetched it
        note.unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(model(), "model.path").folder == folder
    (folder / "model-2.safetensors").unlink()
    with raises("hub.not-reachable"):
        fetch(model(), "model.path")


def test_download_writes_a_folder_that_trains_elsewhere(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/tiny", dict(MODEL))
    folder = download("org/tiny", tmp_path / "copy")
    assert folder == tmp_path / "copy"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    hub.requests.clear()
    (folder / "model.safetensors").write_bytes(b"torn")
    download("org/tiny", folder)  # what was lost comes again, and nothing else
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads() == ["model.safetensors"]
    hub.add("org/other", dict(MODEL))
    with raises("output.folder-not-empty", "org/tiny"):
        download("org/other", folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with raises("output.folder-not-empty"):
        download("org/tiny", tmp_path / "mine")


def test_the_recipe_of_a_run_names_the_commit(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.add("org/tiny", dict(MODEL))
    rows = hub.add("datasets/org/set", {"train.jsonl": ROW, "test.jsonl": ROW})
    recipe = {"model": {"path": "hf://org/tiny"}, "train": {"steps": 1}}
    recipe["data"] = {"train": "hf://org/set", "eval": "hf://org/set"}  # type: ignore[dict-item]
    config = load_config(recipe)
    assert "path: hf://org/tiny" in dump_yaml(config)
    config = with_local_folders(config)
    assert config.model.hub_id == f"hf://org/tiny@{repository.commit}"
    assert config.data.train[0].hub_id == f"hf://datasets/org/set@{rows.commit}"
    assert config.data.train[0].path.name == "train.jsonl"
    assert config.data.eval[0].path.name == "test.jsonl"
    assert len(open_source(config.data.train[0])) == 1
    saved = load_config(json.loads(config.model_dump_json()))
    assert with_local_folders(saved) == config
    # The cache is gone, and the model has moved on: the run still gets what it began with.
    gone = saved.model_copy(update={"model": saved.model.model_copy(update={"path": tmp_path / "gone" / "away"})})
    assert with_local_folders(gone).model.path == config.model.path


def test_a_run_without_a_network_goes_on_without_the_folder(tmp_path: Path) -> None:
    section = {"path": str(tmp_path / "gone" / "x"), "hub_id": f"hf://org/tiny@{'0' * 40}"}
    config = load_config({"model": section, "train": {"steps": 1}})
    assert with_local_folders(config, resumed=True) == config
    with raises("hub.not-reachable"):
        with_local_folders(config)


def test_images_of_a_data_set_are_read_from_the_cache(hub: HubServer) -> None:
    from test_data_sources_asked import png

    from tessera.data.media.files import Limits
    from tessera.data.media.read import probe
    from tessera.data.media.video_frames import VideoSampling

    row = json.dumps({"question": "What?", "answer": "Red", "image": "img/a.png"}).encode()
    hub.add("datasets/org/set", {"train.jsonl": row, "img/a.png": png()})
    source = open_source(SourceSection(path=Path("hf://org/set")))
    assert probe(source.read(0).media()[0], source.root, Limits(), VideoSampling()).width == 6


def test_processes_at_once_download_once(hub: HubServer) -> None:
    hub.add("org/tiny", dict(MODEL), faults={"model.safetensors": "slow"})
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(model(), "model.path"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.folder for one in results}) == 1
    assert sorted(hub.downloads()) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


def test_ranks_of_a_job_get_one_commit(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.add("org/tiny", dict(MODEL))
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    first = fetch(model(), "model.path")
    repository.files["config.json"] = b"{}"  # the branch moves while the ranks start
    hub.requests.clear()
    assert fetch(model(), "model.path") == first
    assert hub.requests == []
    monkeypatch.setenv("MASTER_PORT", "2")  # the next job looks again
    assert fetch(model(), "model.path").id != first.id


def test_a_folder_that_cannot_be_written_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    hub.add("org/tiny", dict(MODEL))
    with raises("hub.cache-not-writable"):
        fetch(model(), "model.path")


def test_modelscope_says_how_to_install_it() -> None:
    import importlib.util

    if importlib.util.find_spec("modelscope_hub") is not None:
        pytest.skip("modelscope is installed")
    with raises("environment.no-modelscope", "ModelScope") as raised:
        fetch(HubId("ms", "model", "org/tiny"), "model.path")
    assert raised.value.fix == "pip install -U modelscope"


def test_download_from_the_shell(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", dict(MODEL))
    words = ["tessera", "download", "hf://org/tiny", "--to", str(tmp_path / "copy"), "--include", "*.json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out == f"{tmp_path / 'copy'}\n"
    assert sorted(path.name for path in (tmp_path / "copy").glob("*.json")) == ["config.json", "tokenizer.json"]
    assert not (tmp_path / "copy" / "model.safetensors").exists()


def test_a_benchmark_downloads_the_files_of_its_split_alone(hub: HubServer, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "1 + 1?", "answer": "#### 2"}]), file)
    names = ("main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet", "socratic/test-0.parquet")
    hub.add("datasets/openai/gsm8k", dict.fromkeys(names, file.read_bytes()))
    benchmark = open_task("gsm8k")
    assert [path.name for path in benchmark.table.files] == ["test-00000-of-00001.parquet"]
    assert hub.downloads() == ["test-00000-of-00001.parquet"]
    assert "openai/gsm8k@" in benchmark.protocol()["data"]["source"]
    ((_, question),) = benchmark.questions(range(1))
    assert isinstance(question, BenchmarkQuestion)
    assert benchmark.metric.mark("It is 2.", question).values["flexible"] == 1
