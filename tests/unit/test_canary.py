"""A pickle that would make a file, in the place of every file that some verb reads: it is never made.

Each verb ends as it would without the file, or with exit code 2. `os.system` of this process would sing, and so would
that of any process that it starts.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tessera
from tessera.errors import TesseraError
from tessera_compat.megatron import dist_checkpointing
from tessera_compat.mindspeed_mm.convert import run as mm_convert
from tests.toys.chat_set import chat_recipe, write_chat_set

pytestmark = pytest.mark.slow  # make test has a poisoned file of each form, in the tests of their readers
CANARY = "TESSERA_CANARY"


class Poison:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f'touch "${CANARY}"',)


def poisons() -> Iterator[bytes]:
    """A bare pickle, one that begins like text, a file of torch.save, and one as torch wrote before 1.6."""
    yield pickle.dumps(Poison(), protocol=2)
    yield pickle.dumps(Poison(), protocol=0)
    for new in (True, False):
        file = io.BytesIO()
        torch.save({"model": {"w": torch.ones(2), "poison": Poison()}}, file, _use_new_zipfile_serialization=new)
        yield file.getvalue()


PLANTED = ("pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "rng_state.pth", "scaler.pt", "training_args.bin")
PLANTED = (
    *PLANTED,
    "tokenizer.pkl",
    "common.pt",
    "model.ckpt",
    "vocab.pickle",
    "data.npy",
    "cache.pkl",
    "__0_0.distcp",
)


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CANARY, str(tmp_path / "canary"))
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "the canary sang"


def test_the_canary_sings_where_a_pickle_is_opened(canary: Path, tmp_path: Path) -> None:
    for data in poisons():
        (tmp_path / "a.pt").write_bytes(data)
        if data[:2] == b"PK" or b"protocol_version" in data:
            torch.load(tmp_path / "a.pt", weights_only=False)
        else:
            pickle.loads(data)  # noqa: S301 - it is to be seen that it works
        assert canary.exists()
        canary.unlink()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that weights and data are read from, below one folder."""
    root = tmp_path_factory.mktemp("sources")
    write_chat_set(root / "data", samples=8)
    recipe = chat_recipe(root / "data", root / "out", steps=1)
    recipe |= {"checkpoint": {"every": 0, "export": True}, "name": "run"}
    hub = tessera.train(recipe).folder / "hf"
    shutil.copytree(hub, root / "hf")
    lora = {
        **recipe,
        "name": "lora",
        "model": {"path": str(root / "hf"), "lora": {"targets": ["text.layers.*.attn.q"]}},
    }
    tessera.convert(tessera.train(lora).folder, root / "adapters", adapters=True)
    shutil.copytree(root / "out" / "run", root / "run", ignore=shutil.ignore_patterns("hf", "report.html", "logs"))
    shutil.rmtree(root / "out")
    tessera.convert(root / "hf", root / "mm", to="mm", layout={"tp": 2})
    tessera.convert(root / "hf", root / "dcp", to="dcp")
    sharded = {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "n": 3}
    dist_checkpointing.save(sharded, root / "megatron")
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def begin(root: Path, **model: str) -> None:
    recipe = yaml.safe_load((root / "recipe.yaml").read_text())
    recipe |= {"out": str(root / "new"), "model": {"path": str(root / "hf"), **model}}
    tessera.train(recipe)


def load_sharded(root: Path) -> None:
    wanted = {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    dist_checkpointing.load(wanted, root / "megatron")


QUESTION = "Say red."
# The folder whose files are exchanged, and what is done with it.
VERBS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "load": ("hf", lambda root: tessera.load(root / "hf", device="cpu")),
    "convert hf to mm": ("hf", lambda root: tessera.convert(root / "hf", root / "new", to="mm", layout={})),
    "convert mm": ("mm", lambda root: tessera.convert(root / "mm", root / "new", like=root / "hf")),
    "convert dcp": ("dcp", lambda root: tessera.convert(root / "dcp", root / "new", like=root / "hf")),
    "convert with --like": ("hf", lambda root: tessera.convert(root / "mm", root / "new", like=root / "hf")),
    "convert a run": ("run", lambda root: tessera.convert(root / "run", root / "new")),
    "mm-convert": (
        "hf",
        lambda root: mm_convert(
            ["GenericDCPConverter", "hf_to_dcp", f"--hf_dir={root / 'hf'}", f"--dcp_dir={root / 'new'}"]
        ),
    ),
    "mm-convert back": (
        "dcp",
        lambda root: mm_convert(
            f"GenericDCPConverter dcp_to_hf --load_dir={root}/dcp --save_dir={root}/new "
            f"--model_assets_dir={root}/hf".split()
        ),
    ),
    "adapters": ("adapters", lambda root: tessera.load(root / "adapters", device="cpu")),
    "dist_checkpointing": ("megatron", load_sharded),
    "model.path": ("hf", begin),
    "model.weights of shards": ("mm", lambda root: begin(root, weights=str(root / "mm"))),
    "model.weights of DCP": ("dcp", lambda root: begin(root, weights=str(root / "dcp"))),
    "data": ("data", begin),
    "resume": ("run", lambda root: tessera.resume(root / "run", {"train.steps": 2})),
    "evaluate": (
        "run",
        lambda root: tessera.evaluate(root / "run", data=root / "data/train.jsonl", max_samples=1, max_new_tokens=1),
    ),
    "compare": (
        "hf",
        lambda root: tessera.compare(root / "hf", root / "data/train.jsonl", max_samples=1, max_new_tokens=1),
    ),
}


def relocated(sources: Path, root: Path) -> Path:
    """A copy in which files name those of the copy."""
    shutil.copytree(sources, root)
    for path in (root / "recipe.yaml", root / "run/config.yaml", root / "adapters/adapter_config.json"):
        path.write_text(path.read_text().replace(str(sources), str(root)))
    return root


@pytest.mark.parametrize("verb", VERBS)
def test_poison_in_the_place_of_each_file(verb: str, sources: Path, tmp_path: Path) -> None:
    attacked, act = VERBS[verb]
    names = sorted(path.relative_to(sources / attacked) for path in (sources / attacked).rglob("*") if path.is_file())
    assert names
    pictures = [name for name in names if name.suffix == ".png"]
    for number, name in enumerate([Path(), *(name for name in names if name not in pictures[1:])]):
        kinds = list(poisons())
        for kind in (
            kinds if verb in ("load", "convert mm", "convert dcp") else [kinds[number % 2], kinds[2 + number % 2]]
        ):
            root = relocated(sources, tmp_path / "root")
            if name == Path():
                for planted in PLANTED:
                    (root / attacked / planted).write_bytes(kind)
            else:
                (root / attacked / name).write_bytes(kind)
            try:
                act(root)
            except TesseraError:
                assert not list(root.glob("new/*.safetensors")), "nothing is half-written"
            shutil.rmtree(root)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.csv", "train.tar", "train.parquet", "train.pt"])
def test_poison_as_a_data_set_and_as_an_image(name: str, sources: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(poisons()):
        root = relocated(sources, tmp_path / "root")
        (root / "data" / name).write_bytes(kind)
        (root / "data/image.pt").write_bytes(kind)
        recipe = yaml.safe_load((root / "recipe.yaml").read_text()) | {"out": str(root / "new")}
        recipe["data"] |= {"train": [{"path": str(root / "data" / name)}], "eval": []}
        if number == 3 and name == "train.jsonl":
            content = [{"type": "image", "image": "image.pt"}, {"type": "text", "text": QUESTION}]
            row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]}
            (root / "data" / name).write_text(json.dumps(row) + "\n")
        with pytest.raises(TesseraError):
            tessera.train(recipe)
        shutil.rmtree(root)
