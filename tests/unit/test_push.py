"""Publishing: what goes, what does not, who may, and the card, with a hub of this machine."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from test_hub import hub

from tessera.cli.main import main
from tessera.errors import TesseraError
from tessera.tools.push import push
from tests.errors import raises
from tests.toys.hub_server import HubServer
from tests.toys.modelscope_server import ModelScopeServer, modelscope_server

__all__ = ["hub"]  # a fixture


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"a": torch.zeros(600)}, path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")
    (path / "own.py").write_text("print(1)")
    (path / "weights.bin").write_bytes(b"x")
    (path / ".secret.json").write_text("{}")
    return path


def adapters(path: Path, base: str) -> Path:
    path.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 100)}, path / "adapter_model.safetensors")
    return path


def run_of(path: Path, model: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    home = "/home/someone/private"
    recipe = {
        "name": "mine",
        "model": model,
        "data": {
            "train": [
                {"path": f"{home}/rows.jsonl", "root": home},
                {"path": f"{home}/x", "hub_id": f"hf://datasets/org/set@{'1' * 40}"},
            ]
        },
        "train": {"steps": 12},
        "optim": {"lr": 0.003},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(recipe))
    rows = [{"kind": "train", "step": 12, "loss": 0.5, "lr": 1e-4}, {"kind": "eval", "step": 12, "eval_loss": 0.75}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sent(hub: HubServer, name: str) -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    for line in hub.repositories[name].commits:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = value["oid"]
    return files


@pytest.fixture(autouse=True)
def logged_in(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    monkeypatch.setenv("HF_TOKEN", "good")


def test_a_dry_run_sends_nothing_and_shows_files_and_card(hub: HubServer, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {"family": "qwen3", "hub_id": f"hf://org/base@{'0' * 40}"})
    folder(run / "hf")
    planned = push(run, "me/new", dry_run=True)
    assert set(planned.files) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert set(planned.left_out) == {".secret.json", "own.py", "weights.bin"}
    assert planned.url is None
    assert hub.requests == []
    assert planned.card is not None
    header = yaml.safe_load(planned.card.split("---")[1])
    assert header["base_model"] == "org/base"
    assert header["datasets"] == ["org/set"]
    assert header["library_name"] == "transformers"
    for word in ("rows.jsonl", "lr: 0.003", "eval_loss", "0.75", "12 steps", "torch "):
        assert word in planned.card, word
    assert "/home/someone" not in planned.card
    assert "would go to me/new" in planned.lines()[0]


def test_a_folder_is_sent_with_its_card(hub: HubServer, tmp_path: Path) -> None:
    done = push(folder(tmp_path / "model"), "me/new", private=True)
    files = sent(hub, "me/new")
    assert set(files) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert hub.repositories["me/new"].private
    assert len(hub.uploads[str(files["model.safetensors"])]) > 2000
    assert done.url == f"{hub.url}/me/new"
    assert b"library_name: transformers" in bytes(files["README.md"])  # type: ignore[arg-type]


def test_a_card_of_the_user_is_kept(hub: HubServer, tmp_path: Path) -> None:
    (folder(tmp_path / "model") / "README.md").write_text("# Mine")
    push(tmp_path / "model", "me/first")
    assert sent(hub, "me/first")["README.md"] == b"# Mine"
    (tmp_path / "model" / "README.md").unlink()
    hub.add("me/second", {"README.md": b"# On the hub"})
    push(tmp_path / "model", "me/second")
    assert "README.md" not in sent(hub, "me/second")


def test_adapters_name_a_base_that_others_can_load(hub: HubServer, tmp_path: Path) -> None:
    path = adapters(tmp_path / "lora", "/home/someone/base")
    with raises("adapter.base-without-name") as raised:
        push(path, "me/lora")
    assert "--base org/name" in str(raised.value.fix)
    push(path, "me/lora", base="org/base")
    assert json.loads(sent(hub, "me/lora")["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert "/home/someone" in (path / "adapter_config.json").read_text()  # the folder itself is not changed
    adapter = adapters(tmp_path / "known", "org/base")
    assert yaml.safe_load(str(push(adapter, "me/x", dry_run=True).card).split("---")[1])["library_name"] == "peft"


def test_who_may_not_write_is_told(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "model")
    monkeypatch.setenv("HF_TOKEN", "bad")
    with raises("hub.token-cannot-write"):
        push(path, "me/new")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    hub.requests.clear()
    with raises("hub.not-logged-in"):
        push(path, "me/new")
    assert hub.requests == []


def test_private_is_not_taken_for_public(hub: HubServer, tmp_path: Path) -> None:
    hub.add("me/open", {})
    with raises("hub.repository-is-public"):
        push(folder(tmp_path / "model"), "me/open", private=True)
    assert hub.repositories["me/open"].commits == []


def test_what_cannot_be_published_is_refused(hub: HubServer, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {"family": "qwen3"})
    with raises("hub.nothing-exported"):
        push(run, "me/new")
    folder(run / "hf")
    adapters(run / "adapter", "org/base")
    with raises("hub.two-exports"):
        push(run, "me/new")
    with raises("hub.nothing-to-push"):
        push(tmp_path, "me/new")
    with raises("hub.not-a-name"):
        push(run / "hf", "ms://me/new@v1")
    (tmp_path / "secret.json").write_text("{}")
    (run / "hf" / "extra.json").symlink_to(tmp_path / "secret.json")
    with raises("weights.link-out-of-folder"):
        push(run / "hf", "me/new")
    assert "me/new" not in hub.repositories


def test_push_from_the_shell(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tessera", "push", str(folder(tmp_path / "model")), "me/new", "--dry-run"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert not exited.value.code
    assert "would go to me/new: 4 files" in capsys.readouterr().out


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelScopeServer]:
    pytest.importorskip("modelscope_hub")
    with modelscope_server() as server:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", "good")
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield server


def test_a_model_and_adapters_go_to_modelscope_as_its_library_sends_them(
    modelscope: ModelScopeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder(tmp_path / "model")
    planned = push(model, "ms://me/mine", dry_run=True)
    assert planned.url is None
    assert modelscope.requests == []
    before = sorted(path.name for path in model.iterdir())
    sent = push(model, "ms://me/mine", message="A first one", private=True)
    assert sent.url == f"{modelscope.url}/models/me/mine"
    assert set(modelscope.models["me/mine"]) == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert modelscope.models["me/mine"]["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert modelscope.private["me/mine"]
    assert all(message.startswith("A first one") for message in modelscope.messages)
    assert sorted(path.name for path in model.iterdir()) == before
    modelscope.models["me/mine"]["README.md"] = b"# by hand"
    assert push(model, "ms://me/mine").card is None
    assert modelscope.models["me/mine"]["README.md"] == b"# by hand"
    push(adapters(tmp_path / "lora", "org/base"), "ms://me/lora")
    assert json.loads(modelscope.models["me/lora"]["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    with raises("hub.repository-is-public"):
        push(model, "ms://me/lora", private=True)
    printed = capsys.readouterr()
    assert "Upload Report" not in printed.out
    assert "Commit plan" not in printed.err


def test_modelscope_without_a_token_sends_nothing(
    modelscope: ModelScopeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "bad")
    with pytest.raises(TesseraError, match="nobody is logged in to ModelScope") as raised:
        push(folder(tmp_path / "model"), "ms://me/mine")
    assert "modelscope login" in str(raised.value.fix)
    assert modelscope.models == {}
