"""Folders and targets that `tessera convert` must refuse: one clear error, exit code 2, and nothing changed on disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_folders import small_folder

import tessera
from tessera.checkpoint.publish import made_from
from tessera.cli.main import main
from tests.quick import quick

WEIGHTS, INDEX, RANK = "model.safetensors", "model.safetensors.index.json", "mm/release/mp_rank_0{}/model_optim_rng.pt"
HALVES = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
TO_MM = ["convert", "hf", "out", "--to", "mm"]
FROM_MM, FROM_DCP = (["convert", form, "out", "--like", "hf", "--prove", "never"] for form in ("mm", "dcp"))
CASES: dict[str, tuple[Callable[[], None], list[str], str]] = {}


def case(said: str, *words: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What a function does to the folders `hf`, `mm` and `dcp` of the current folder; the command, and its error."""

    def add(change: Callable[[], None]) -> Callable[[], None]:
        CASES[change.__name__.replace("_", " ")] = change, list(words), said
        return change

    return add


def nothing() -> None: ...


CASES |= {
    "tp beyond the key-value heads": (nothing, [*TO_MM, "--layout", "{tp: 3}"], "tp 3 does not divide 2 key-value"),
    "layers that do not fit": (nothing, [*TO_MM, "--layout", "{llm: [[1, 1]], vit: [[1, 1]]}"], "sum to"),
    "the target is the source": (nothing, ["convert", "hf", "hf", "--overwrite"], "output.replaces-source"),
    "the target is --like": (nothing, ["convert", "mm", "hf", "--like", "hf"], "output.replaces-source"),
    "the target holds the source": (nothing, ["convert", "hf", ".", "--overwrite"], "output.replaces-source"),
    "no source": (nothing, ["convert", "hff", "out"], "did you mean: hf"),
    "tensor ranks without end": (nothing, [*TO_MM, "--layout", "{tp: 5000}"], "a number of ranks from 1 to 100"),
    "stages without end": (nothing, [*TO_MM, "--layout", f"{{llm: {[0] * 2000}}}"], "llm has 2,000 stages"),
    "ranks without end": (nothing, [*TO_MM, "--layout", f"{{tp: 100, llm: {[0] * 200}}}"], "20,000 rank files"),
    "no folder for --like": (nothing, [*FROM_MM[:4], "nowhere"], "weights.no-config-file"),
}


def edit(change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(f"hf/{WEIGHTS}")
    change(tensors)
    save_file(tensors, f"hf/{WEIGHTS}")


def split(change: Callable[[dict[str, str]], Any] = lambda table: None) -> None:
    tensors = load_file(f"hf/{WEIGHTS}")
    os.remove(f"hf/{WEIGHTS}")
    table = {name: HALVES[number % 2] for number, name in enumerate(tensors)}
    for half in HALVES:
        save_file({name: tensors[name] for name in table if table[name] == half}, f"hf/{half}")
    change(table)
    Path(f"hf/{INDEX}").write_text(json.dumps({"weight_map": table}))


def edit_rank(number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    path = RANK.format(number)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def link_away(path: str) -> None:
    shutil.move(path, "away")
    Path(path).symlink_to(Path("away").absolute())


@case("missing: text.norm.weight", *TO_MM)
def a_missing_tensor() -> None:
    edit(lambda tensors: tensors.pop("model.norm.weight"))


@case("unexpected: strange", *TO_MM)
def a_tensor_too_many() -> None:
    edit(lambda tensors: tensors.update(strange=torch.ones(2)))


@case("the weights do not fit the model", *FROM_MM)
def another_family() -> None:
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": not config["tie_word_embeddings"]}))


@case("has an unexpected type", *TO_MM)
def a_number_for_a_mapping_in_the_configuration() -> None:
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | {"vision_config": 5}))


@case("image_mean = 'grey' must be a list", "convert", "hf", "out", "--prove", "never")
def a_word_for_numbers_of_the_preprocessor() -> None:
    settings = json.loads(Path("hf/preprocessor_config.json").read_text())
    Path("hf/preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": "grey"}))


@case("header too large", *TO_MM)
def a_header_of_2_to_60_bytes() -> None:
    data = Path(f"hf/{WEIGHTS}").read_bytes()
    Path(f"hf/{WEIGHTS}").write_bytes(struct.pack("<Q", 1 << 60) + data[8:])


@case("not a readable safetensors file", *TO_MM)
def tensors_that_overlap() -> None:
    data = Path(f"hf/{WEIGHTS}").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    first, second, *_ = (name for name in header if name != "__metadata__")
    begin, end = header[first]["data_offsets"]
    header[second]["data_offsets"] = [begin, begin + end - begin]
    text = json.dumps(header).encode()
    Path(f"hf/{WEIGHTS}").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@case("model.safetensors is a link out of the folder", *TO_MM)
def weights_behind_a_link() -> None:
    link_away(f"hf/{WEIGHTS}")


@case("is a link out of the folder", *TO_MM)
def a_shard_behind_a_link() -> None:
    split()
    link_away(f"hf/{HALVES[1]}")


@case(".metadata is a link out of the folder", *FROM_DCP)
def dcp_metadata_behind_a_link() -> None:
    link_away("dcp/.metadata")


@case("__0_0.distcp is a link out of the folder", *FROM_DCP)
def dcp_parts_behind_a_link() -> None:
    link_away("dcp/__0_0.distcp")


@case("is a link out of the folder", *FROM_MM)
def all_rank_files_behind_a_link() -> None:
    link_away("mm/release")


@case("weights.path-outside-folder", *TO_MM)
def an_index_that_leads_out() -> None:
    split(lambda table: table.update(strange="../secret.safetensors"))


@case("weights.indexed-file-missing", *TO_MM)
def an_index_of_a_missing_file() -> None:
    split(lambda table: table.update(strange="gone.safetensors"))


@case("weights.damaged-index", *TO_MM)
def an_index_nested_too_deep() -> None:
    split()
    Path(f"hf/{INDEX}").write_text("[" * 100_000)


@case("weights.duplicate-tensor", *TO_MM)
def a_tensor_in_two_files() -> None:
    split()
    first, two = (load_file(f"hf/{half}") for half in HALVES)
    save_file(two | {name: first[name] for name in list(first)[:1]}, f"hf/{HALVES[1]}")


@case("megatron.rank-files-missing", *FROM_MM)
def a_missing_rank() -> None:
    shutil.rmtree("mm/release/mp_rank_00")


@case("mp_rank_00 of iteration 100, mp_rank_01 of iteration 200", *FROM_MM)
def ranks_of_different_iterations() -> None:
    for number in range(2):
        edit_rank(number, lambda content, number=number: content.update(iteration=100 * (number + 1)))  # type: ignore[misc]


@case("megatron.slices-differ", *FROM_MM)
def ranks_of_different_types() -> None:
    halved = lambda content: content.update(model={name: t.half() for name, t in content["model"].items()})  # noqa: E731
    edit_rank(1, halved)


@case("megatron.latest-iteration", *FROM_MM)
def an_iteration_that_leads_out() -> None:
    Path("mm/latest_checkpointed_iteration.txt").write_text("../release")


@case("checkpoint.damaged-torch-file", *FROM_MM)
def an_archive_with_two_pickles() -> None:
    with zipfile.ZipFile(RANK.format(0), "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data.pkl", b"N.")


@case("checkpoint.damaged-torch-file", *FROM_MM)
def an_archive_that_would_grow() -> None:
    with zipfile.ZipFile(RANK.format(0), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(30 << 20))


@case("output.target-is-file", *TO_MM)
def a_file_as_target() -> None:
    Path("out").write_text("mine")


@case("output.folder-not-empty", *TO_MM)
def a_target_with_other_files() -> None:
    Path("out").mkdir()
    Path("out/mine").write_text("mine")


def record_of(origin: Any) -> None:
    """An export with a record in the target."""
    Path("out").mkdir()
    Path("out/tessera_export.json").write_text(json.dumps({"format": "tessera-export", "version": 1, "origin": origin}))


@case("output.folder-not-empty", *TO_MM)
def an_earlier_export_of_another_source() -> None:
    record_of(made_from("mm", "other"))


@case("output.folder-not-empty", *TO_MM)
def an_earlier_export_in_another_form() -> None:
    record_of(made_from("dcp", "hf"))


@case("output.folder-not-empty", *TO_MM)
def a_record_that_says_something_else() -> None:
    record_of([[["form"]]])


@case("output.folder-not-empty", *TO_MM)
def a_record_that_is_nested_without_end() -> None:
    record_of(0)
    Path("out/tessera_export.json").write_text("[" * 100_000)


@case("output.folder-not-empty", *TO_MM)
def a_record_that_is_a_pipe() -> None:
    Path("out").mkdir()
    os.mkfifo("out/tessera_export.json")


@case("output.write-failed", "convert", "hf", "file/out", "--to", "mm")
def a_target_in_a_file() -> None:
    Path("file").write_text("mine")


@case("output.target-is-link", *TO_MM, "--overwrite")
def a_link_as_target() -> None:
    Path("elsewhere").mkdir()
    Path("out").symlink_to("elsewhere")


@case("output.target-is-link", *TO_MM)
def a_link_to_nowhere_as_target() -> None:
    Path("out").symlink_to("nowhere")


CASES["a target where nothing can be"] = (
    nothing,
    ["convert", "hf", "/proc/out", "--to", "dcp"],
    "output.write-failed",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    small_folder("qwen2_vl", root)
    tessera.convert(root / "hf", root / "mm", to="mm", layout={"tp": 2})
    tessera.convert(root / "hf", root / "dcp", to="dcp")
    (root / "tokenizer.json").unlink()
    return root


def contents(folder: Path) -> dict[str, Any]:
    """All files, folders and links below a folder."""
    outcomes: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        outcomes[str(path)] = (
            os.readlink(path) if path.is_symlink() else path.is_dir() or path.is_fifo() or path.read_bytes()
        )
    return outcomes


def typed(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that ends with 2 says."""
    monkeypatch.setattr(sys, "argv", ["tessera", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("name", quick(CASES, *list(CASES)[::3]))
def test_it_is_refused_and_nothing_changes(
    name: str, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words, said = CASES[name]
    for folder in {"hf", words[1]} & {"hf", "mm", "dcp"}:
        shutil.copytree(prepared / folder, tmp_path / "here" / folder)
    monkeypatch.chdir(tmp_path / "here")
    change()
    before = contents(tmp_path)
    assert said in typed(words, capsys, monkeypatch)
    assert contents(tmp_path) == before


TO_HF = ["convert", "hf", "out", "--prove", "never"]


@pytest.mark.parametrize(
    "words",
    [TO_MM, ["convert", "hf", "out", "--to", "dcp"], FROM_MM, TO_HF, [*TO_HF, "--quantize", "fp8"]],
    ids=["mm", "dcp", "from mm", "hf", "fp8"],
)
def test_a_full_disk_is_said_and_leaves_nothing_under_the_name(
    words: list[str],
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit for the size of files is what comes nearest to a full disk without one."""
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        said = typed(words, capsys, monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be written: File too large" in said
    assert "output.write-failed" in said
    assert "ulimit -f" in said
    assert contents(tmp_path) == before


def test_the_cache_of_a_hub_is_made_of_links_that_are_followed(prepared: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0a1b"
    shutil.copytree(prepared / "hf", blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    tessera.convert(snapshot, tmp_path / "out", to="mm", layout={})
    assert (tmp_path / "out/release/mp_rank_00/model_optim_rng.pt").is_file()
