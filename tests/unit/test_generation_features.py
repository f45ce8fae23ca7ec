"""Features of images and videos: written once by real encoders, read as what they make in every step."""

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
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import tessera
from tessera.config.run_config import load_config
from tessera.core.task import FrozenModule
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.order.packed_rows import PackedRows
from tessera.diffusion import features as feature_files
from tessera.diffusion.feature_facts import form_facts
from tessera.diffusion.feature_folder import EMPTY, MANIFEST
from tessera.diffusion.features import PLAN
from tessera.diffusion.hunyuan_video.config import HunyuanVideoConfig
from tessera.diffusion.qwen_image.config import EDIT, QwenImageConfig
from tessera.diffusion.wan.config import WanConfig
from tessera.runtime.distributed import World
from tessera.tasks import build_task
from tessera.tools.data_features import write_features
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model
from tests.errors import raises
from tests.toys.generation_set import write_image, write_jsonl, write_video
from tests.toys.latent_mixer import SPEC as MIXER
from tests.toys.pipeline_folder import write_pipeline_folder

LENGTH = 24
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with random weights, and eleven samples of which one cannot be decoded and one is too large."""
    folder = tmp_path_factory.mktemp("features")
    write_pipeline_folder(folder / "pipeline")
    rows: list[dict[str, Any]] = []
    for number in range(9):
        if number % 3:
            write_image(folder / "set" / f"{number}.png", (32, 32 + 16 * (number % 2)), 20 * number)
        else:
            write_video(folder / "set" / f"{number}.mp4", 5 + number)
        name = f"{number}.png" if number % 3 else f"{number}.mp4"
        rows.append({"path": name, "cap": "a red square moving"[: 5 + number], "id": f"s{number}"})
    write_jsonl(folder / "set" / "good.jsonl", rows)
    write_video(folder / "set" / "torn.mkv", 30)
    data = (folder / "set" / "torn.mkv").read_bytes()
    (folder / "set" / "torn.mkv").write_bytes(data[: len(data) // 2])
    write_image(folder / "set" / "large.png", (160, 160))
    rows += [{"path": "torn.mkv", "cap": "red", "id": "torn"}, {"path": "large.png", "cap": "red", "id": "large"}]
    write_jsonl(folder / "set" / "all.jsonl", rows)
    return folder


def recipe(world: Path, train: Path | None = None, **changed: Any) -> dict[str, Any]:
    encoders = {"folder": str(world / "pipeline"), "text": {"dtype": "float32", "residence": "device"}}
    return {
        "model": {"family": "tests.toys.latent_mixer", "tokenizer": str(world / "pipeline")},
        "data": {
            "kind": "generation",
            "train": str(train or world / "set" / "all.jsonl"),
            "length": LENGTH,
            "workers": 0,
            "processor": {"num_frames": 9},
        },
        "train": {
            "steps": 3,
            "global_batch": 2,
            "micro_batch": 1,
            "device": "cpu",
            "task_options": {} if train else {"encoders": encoders},
        },
        "optim": {"lr": 0.01},
        "log": {"every": 1},
        **changed,
    }


def rows_of(config: dict[str, Any]) -> PackedRows:
    loaded = load_config(config)
    setup = build_meta_model(loaded, 1)
    rows = KINDS.get("generation")(RowRequest(loaded.data, "train", build_processor(loaded, setup), 0))
    assert isinstance(rows, PackedRows)
    return rows


@pytest.fixture(scope="module")
def features(world: Path) -> Path:
    done = write_features(recipe(world), world / "features", shard=4, batch=3)
    assert (done.samples, done.before, done.shards, done.missing) == (9, 0, 3, 0)
    assert sorted(id for id, *_ in done.bad) == ["large", "torn"]
    assert {bad.id: bad.code for bad in done.bad}["large"] == "data.sample-too-long"
    return world / "features"


def stored_ids(folder: Path) -> list[str]:
    ids = []
    for file in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            ids += [one["id"] for one in json.loads(shard.metadata()["features"])["samples"]]
    return ids


def stored_shapes(folder: Path) -> list[tuple[str, list[int]]]:
    shapes = []
    for file in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            shapes += [(name, shard.get_slice(name).get_shape()) for name in shard.keys()]  # noqa: SIM118
    return shapes


def test_features_are_written_in_the_order_of_the_data(features: Path) -> None:
    assert stored_ids(features) == [f"s{number}" for number in range(9)]
    shards = [f"shard-{number:05d}.safetensors" for number in range(3)]
    assert sorted(path.name for path in features.iterdir()) == [EMPTY, MANIFEST, *shards]
    manifest = json.loads((features / MANIFEST).read_text())
    assert sum(one["samples"] for one in manifest["shards"]) == 9
    assert set(manifest["facts"]["components"]) == {"vae", "text_encoder"}


@pytest.mark.parametrize("padding", [pytest.param("none", marks=pytest.mark.slow), "zeros"])
def test_training_on_features_equals_training_on_media(world: Path, tmp_path: Path, padding: str) -> None:
    """The same rows, seeds and losses; encoders that see other samples beside a sample round otherwise."""
    model = {**recipe(world)["model"], "config": {"padding": padding}}
    media, folder = recipe(world, model=model), tmp_path / "features"
    media["train"]["task_options"]["caption_dropout"] = 0.5
    media["data"]["train"] = str(world / "set" / "good.jsonl")
    write_features(media, folder)
    texts = [shape[0] for name, shape in stored_shapes(folder) if name.endswith(".text")]
    assert max(texts) < 8  # zeros that follow a caption are not stored
    online = tessera.train({**media, "out": str(tmp_path / "a")})
    stored = {**media, "data": {**media["data"], "train": str(folder)}}  # the empty caption is among the features
    assert set(build_meta_model(load_config(media), 1).plan.memory.frozen) == {"vae", "text_encoder"}
    assert not build_meta_model(load_config(stored), 1).plan.memory.frozen  # nothing is left to encode
    offline = tessera.train({**stored, "out": str(tmp_path / "b")})
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in (online, offline)]
    assert len(losses[0]) == 3
    assert torch.allclose(*(torch.tensor(some) for some in losses), rtol=1e-5)
    assert losses[0][0] != losses[0][1]


def test_encoders_are_read_where_held_out_data_are_media(world: Path, features: Path) -> None:
    measured, media = recipe(world, features), recipe(world)
    measured["data"]["eval"] = media["data"]["train"]
    encoders = {**media["train"]["task_options"]["encoders"], "steps": 2}
    measured["train"] |= {"eval_every": 1, "task_options": {"encoders": encoders, "caption_dropout": 1.0}}
    setup = build_meta_model(load_config(measured), 1)
    assert set(setup.plan.memory.frozen) == {"vae", "text_encoder"}
    parts = {name: FrozenModule(frozen.component.loaded(), CPU, "device") for name, frozen in setup.frozen.items()}
    setup.task.setup(parts, World(0, 1, 0, CPU))
    read = rows_of(measured).batch([0])
    (batch,) = setup.task.encode([read])
    assert batch is read
    assert not torch.equal(setup.task.inputs(batch)["text"], read["text"])  # captions of features are dropped as well


def test_noise_on_given_images_is_refused_where_the_data_are_features(world: Path, features: Path) -> None:
    task = build_task("diffusion", {"encoders": {}, "given_noise": {}})
    with raises("generation.given-noise-with-features"):
        task.components(load_config(recipe(world, features)), MIXER)


def test_batches_of_features_are_packed_as_media_are(world: Path, features: Path) -> None:
    media, stored = rows_of(recipe(world)), rows_of(recipe(world, features))
    from_media, other = media.batch(range(len(media))), stored.batch(range(len(media)))
    assert set(other.sample_ids) <= set(from_media.sample_ids)
    assert not stored.decodes_media
    assert other["clean"].shape == (len(media) * LENGTH, 16)
    assert "frames" not in other
    assert other["text"].shape == (sum(other.segments["text"].lengths), 16)
    padding = torch.ones(len(other["clean"]), dtype=torch.bool)
    padding[other["trained"]] = False
    assert not other["clean"][padding].any()
    assert other["clean"][other["trained"]].abs().min(1).values.gt(0).any()


def test_a_start_after_a_kill_makes_only_what_is_missing(world: Path, features: Path, tmp_path: Path) -> None:
    first = write_features(recipe(world), tmp_path / "f", shard=4, batch=3)
    assert first.missing == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()}
    (tmp_path / "f" / MANIFEST).rename(tmp_path / "f" / PLAN)  # which says the same of what they are made from
    (tmp_path / "f" / "shard-00001.safetensors").unlink()
    torn = tmp_path / "f" / "shard-00002.safetensors"
    torn.write_bytes(whole[torn.name][:-10])
    (tmp_path / "f" / "shard-00001.safetensors.77.part").write_bytes(b"half")
    again = write_features(recipe(world), tmp_path / "f", shard=4, batch=3)
    assert (again.samples, again.before) == (5, 4)
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()} == whole
    assert sorted(id for id, *_ in again.bad) == ["large", "torn"]
    rest = write_features(recipe(world), tmp_path / "f", shard=4, batch=3)
    assert (rest.samples, rest.before) == (0, 9)


def test_ranks_share_the_shards(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    results = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        results.append(write_features(recipe(world), tmp_path / "f", shard=4))
    assert [(one.samples, one.missing) for one in results] == [(5, 1), (4, 0)]
    assert "by other ranks" in results[0].lines()[-1]
    assert stored_ids(tmp_path / "f") == [f"s{number}" for number in range(9)]


def test_a_folder_of_other_features_is_left_alone(world: Path, features: Path) -> None:
    other = recipe(world)
    other["data"]["processor"] = {"num_frames": 5}
    with raises("data.features-made-otherwise"):
        write_features(other, features, shard=4)
    with raises("data.features-made-otherwise"):
        write_features(recipe(world), features, shard=5)
    with raises("data.already-features"):
        write_features({**recipe(world, features)}, world / "again")


def test_features_of_another_model_or_vae_are_refused(world: Path, features: Path, tmp_path: Path) -> None:
    wide = recipe(world, features)
    wide["model"]["config"] = {"channels": 8}
    with raises("data.features-of-another-model"):
        rows_of(wide)
    joint = recipe(world, features)
    joint["model"]["config"] = {"joint": True}
    with raises("data.features-of-another-model"):
        rows_of(joint)
    copy = tmp_path / "pipeline"
    subprocess.run(["cp", "-r", str(world / "pipeline"), str(copy)], check=True)
    weights = copy / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 0.001 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    other = recipe(world, features)
    other["model"]["tokenizer"] = str(copy)
    with raises("data.features-of-another-encoder"):
        rows_of(other)
    with raises("data.features-mixed-with-media"):
        rows_of(
            {
                **recipe(world, features),
                "data": {**recipe(world)["data"], "train": [str(features), str(world / "set/all.jsonl")]},
            }
        )


def test_damaged_shards_are_named(world: Path, features: Path, tmp_path: Path) -> None:
    copy = tmp_path / "f"
    subprocess.run(["cp", "-r", str(features), str(copy)], check=True)
    shard = copy / "shard-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with raises("data.damaged-features", "shard-00001.safetensors", "features.json"):
        rows_of(recipe(world, copy))
    shard.write_bytes((copy / "shard-00002.safetensors").read_bytes()[: len(data)].ljust(len(data), b"\0"))
    with raises("data.damaged-features"):
        rows_of(recipe(world, copy))
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["shards"][0]["file"] = "../outside.safetensors"
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with raises("data.features-outside-folder"):
        rows_of(recipe(world, copy))


def test_a_shard_that_is_lost_later_is_masked(world: Path, features: Path, tmp_path: Path) -> None:
    copy = tmp_path / "f"
    subprocess.run(["cp", "-r", str(features), str(copy)], check=True)
    rows = rows_of(recipe(world, copy))
    for file in copy.glob("shard-*"):
        file.write_bytes(b"")
    batch = rows.batch([0])
    assert len(batch.problems) == len(batch.sample_ids)
    assert len(batch["trained"]) == 0
    assert batch["clean"].shape == (LENGTH, 16)
    assert batch["text"].shape == (0, 16)


def problems_of(rows: PackedRows) -> list[str]:
    return sorted(id for row in range(len(rows)) for id, *_ in rows.batch([row]).problems)


def test_a_flipped_byte_costs_its_sample(world: Path, features: Path, tmp_path: Path) -> None:
    copy = tmp_path / "f"
    subprocess.run(["cp", "-r", str(features), str(copy)], check=True)
    assert problems_of(rows_of(recipe(world, copy))) == []
    for name in ("shard-00000.safetensors", "shard-00002.safetensors"):  # the first sample and the last one
        data = bytearray((copy / name).read_bytes())
        data[8 + int.from_bytes(data[:8], "little") if "00000" in name else -1] ^= 1
        (copy / name).write_bytes(data)
    damaged = problems_of(rows_of(recipe(world, copy)))
    assert len(damaged) == 2
    assert damaged[1] == "s8"
    empty = bytearray((copy / EMPTY).read_bytes())
    empty[-1] ^= 1
    (copy / EMPTY).write_bytes(empty)
    with raises("data.damaged-features"):
        rows_of(recipe(world, copy))


def test_features_without_checksums_are_read_and_it_is_said(
    world: Path, features: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "f"
    subprocess.run(["cp", "-r", str(features), str(copy)], check=True)
    for file in copy.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
            about = re.sub(r', "crc32": \d+', "", shard.metadata()["features"])
        file.write_bytes(save(tensors, {"features": about}))
    manifest = json.loads((copy / MANIFEST).read_text())
    for entry in manifest["shards"]:
        entry["bytes"] = (copy / entry["file"]).stat().st_size
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with raises("data.too-many-bad-samples"):  # checksums that are gone are damage
        rows_of(recipe(world, copy))
    assert not caplog.text.count("no checksums")
    del manifest["checksums"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert problems_of(rows_of(recipe(world, copy))) == []
    assert caplog.text.count("no checksums") == 1


@pytest.mark.slow
def test_twenty_kills_lose_and_double_no_sample(world: Path, features: Path, tmp_path: Path) -> None:
    config = tmp_path / "recipe.json"
    config.write_text(json.dumps(recipe(world)))
    command = [sys.executable, "-m", "tests.toys.killed_features", str(config), str(tmp_path / "f"), "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == 20
    assert stored_ids(tmp_path / "f") == stored_ids(features)
    write_features(recipe(world), tmp_path / "undisturbed", shard=1, batch=1)
    killed, undisturbed = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}
        for name in ("f", "undisturbed")
    )
    assert killed == undisturbed
    assert not list((tmp_path / "f").glob("*.part"))


def test_a_second_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes temporary files, also those of a live process."""
    replace, file, seen = os.replace, tmp_path / "shard-00000.safetensors", []

    def interrupted(source: Path, target: Path) -> None:
        seen.append(source)
        if len(seen) == 1:
            source.unlink()
            file.write_bytes(b"content")
        replace(source, target)

    monkeypatch.setattr(feature_files.os, "replace", interrupted)
    feature_files.publish(file, b"content")
    feature_files.publish(tmp_path / PLAN, b"{}")
    assert len({path.name.partition(".")[2] for path in seen}) == 2, "processes of one number would share a name"
    assert sorted(path.name for path in tmp_path.iterdir()) == [PLAN, file.name]
    with raises("output.not-writable"):
        feature_files.publish(tmp_path / "gone" / "a", b"")


def test_facts_of_features_have_the_keys_of_earlier_releases() -> None:
    text = {
        "encoder": "text_encoder",
        "tokenizer": "tokenizer",
        "length": 512,
        "template": "{}",
        "image": "",
        "tidy": True,
        "skip": 0,
        "padding": "zeros",
        "pad": None,
        "masked": True,
        "layer": -1,
        "tokens": True,
        "pooled": False,
        "beside": False,
    }
    assert form_facts(WanConfig().generation()) == {"channels": 16, "patch": [1, 2, 2], "joint": False, "text": [text]}
    frames = form_facts(HunyuanVideoConfig(image_condition_type="token_replace").generation())["text"][0]["shown"]
    assert (frames["every"], frames["tokens"], frames["word"]) == (4, 576, "<image>")
    edit = form_facts(QwenImageConfig().generation(), EDIT)["edit"]
    assert (edit["text"]["image"], edit["text"]["blank"], edit["text"]["shown"]) == ("<|image_pad|>", "", None)
