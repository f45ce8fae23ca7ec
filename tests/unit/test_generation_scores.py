"""Scores of generated images and videos against their definitions, their files, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tessera.cli.main import main
from tessera.evaluation.generation.distances import Moments, frechet_distance, kernel_distance
from tessera.evaluation.generation.feature_models import open_clip, open_features
from tessera.evaluation.generation.inception import WIDTH, Inception, InceptionA, InceptionE, fill
from tessera.evaluation.generation.page import write_scores
from tessera.evaluation.generation.samples import GeneratedSample, read_samples
from tessera.evaluation.generation.scores import ScoreOptions, Scores, score
from tests.errors import raises
from tests.toys.scored_samples import (
    PROMPTS,
    drawn,
    inception_tensors,
    write_clip,
    write_clips,
    write_dinov2,
    write_images,
)

pytest.importorskip("transformers", reason="reads the feature models")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dinov2(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), 24)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("videos"), 3)


def prompt_file(folder: Path, path: Path) -> Path:
    names = sorted(file.name for file in folder.iterdir())
    path.write_text(json.dumps({name: PROMPTS[n % 3] for n, name in enumerate(names)}))
    return path


def test_clip_score_is_that_of_the_model_s_own_logits(clip: Path, images: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    result = score(images, ScoreOptions(prompt_file(images, tmp_path / "p.json"), clip=clip), "cpu")
    model, words = CLIPModel.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
    pictures = [Image.open(file).convert("RGB") for file in sorted(images.iterdir())]
    pixels = CLIPImageProcessorPil.from_pretrained(clip)(pictures, return_tensors="pt")["pixel_values"]
    tokens = words(list(PROMPTS), padding=True, return_tensors="pt")
    inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    with torch.no_grad():
        cosines = model(pixel_values=pixels, **inputs).logits_per_image / model.logit_scale.exp()
    expected = [100 * max(0.0, float(cosines[n, n % 3])) for n in range(24)]
    values = [row["clip_score"] for row in result.rows]
    assert values == pytest.approx(expected, abs=1e-3)
    assert len(set(map(round, values))) > 2, "the scores differ between samples"
    assert result.values["clip_score"]["value"] == pytest.approx(sum(expected) / 24, abs=1e-3)
    assert result.values["clip_score"]["interval_95"] is None, "three prompts are too few"
    assert any("no interval" in text for text in result.warnings)


def test_long_prompts_are_cut_and_counted(clip: Path) -> None:
    model = open_clip(clip, "cpu")
    texts = ["a cat", "the dog " * 40, "the dog " * 50]
    encoded = model.encode_texts(texts)
    assert model.truncated == 2
    assert torch.equal(encoded[1], encoded[2])
    assert not torch.equal(encoded[0], encoded[1])


@pytest.mark.parametrize("kind", ["clip", "dinov2"])
def test_frame_consistency_is_vbench_s(kind: str, videos: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The sum over frames of the mean of two cosines, divided by the number of frames of all videos."""
    folder = request.getfixturevalue("clip" if kind == "clip" else "dino")
    (tmp_path / "v").mkdir()
    for number, file in enumerate(sorted(videos.iterdir())):
        (tmp_path / "v" / file.name).write_bytes(file.read_bytes())
        assert GeneratedSample(file).frames().shape == (5, 40, 32, 3), number
    write_clips(tmp_path / "v" / "more", 1, frames=9)
    (tmp_path / "v" / "more" / "000.mp4").rename(tmp_path / "v" / "long.mp4")
    (tmp_path / "v" / "more").rmdir()
    result = score(tmp_path / "v", ScoreOptions(consistency=folder), "cpu")
    model, total, count = open_features(folder, "cpu"), 0.0, 0
    for file in sorted((tmp_path / "v").iterdir()):
        features = model.encode(list(GeneratedSample(file).frames()))
        for i in range(1, len(features)):
            before = max(0.0, float(F.cosine_similarity(features[i], features[i - 1], dim=0)))
            first = max(0.0, float(F.cosine_similarity(features[i], features[0], dim=0)))
            total, count = total + (before + first) / 2, count + 1
    value = result.values[f"frame_consistency_{kind}"]["value"]
    assert value == pytest.approx(total / count, abs=1e-5)
    assert value < 1 - 1e-4, "the frames differ"


def test_distances_of_a_vision_model_have_its_name(dino: Path, images: Path, tmp_path: Path) -> None:
    other = write_images(tmp_path / "other", 30, first=100)
    options = ScoreOptions(features=dino, reference=other, save_features=tmp_path / "f.safetensors")
    result = score(images, options, "cpu")
    model = open_features(dino, "cpu")
    first, second = (
        torch.cat([model.encode([np.asarray(Image.open(file))]) for file in sorted(folder.iterdir())])
        for folder in (images, other)
    )
    expected = frechet_distance(Moments.of(first), Moments.of(second))
    assert set(result.values) == {"fd_dinov2", "kd_dinov2"}
    assert result.values["fd_dinov2"]["value"] == pytest.approx(expected, rel=1e-3)
    assert result.values["kd_dinov2"]["value"] == pytest.approx(kernel_distance(first, second).estimate.value, rel=1e-3)
    assert any("fd_dinov2 of 24 samples is too high" in text for text in result.warnings)
    stored = load_file(tmp_path / "f.safetensors")["features"]
    assert torch.allclose(stored, first, atol=1e-4)
    again = score(images, ScoreOptions(features=dino, reference=tmp_path / "f.safetensors"), "cpu")
    assert again.values["fd_dinov2"]["value"] < 1e-6 * float(Moments.of(first).covariance.trace())
    moments = Moments.of(second)
    np.savez(tmp_path / "s.npz", mu=moments.mean.numpy(), sigma=moments.covariance.numpy())
    published = score(images, ScoreOptions(features=dino, reference=tmp_path / "s.npz"), "cpu")
    assert published.values["fd_dinov2"]["value"] == pytest.approx(expected, rel=1e-3)
    assert any("kd_dinov2 is left out" in text for text in published.warnings)
    assert any("does not state its feature model" in text for text in published.warnings)


def test_inception_has_the_published_tensors() -> None:
    with torch.device("meta"):
        module = Inception()
    tensors = module.state_dict()
    assert len(tensors) == 566
    assert sum(tensor.numel() for name, tensor in tensors.items() if "num_batches" not in name) == 23_885_392
    lost = "Mixed_7c.branch_pool.conv.weight"
    assert fill(module, {name: tensor for name, tensor in tensors.items() if name != lost}) == [lost]
    assert fill(module, {**tensors, "more": torch.zeros(1)}) == ["more"]
    assert fill(module, {**tensors, lost: torch.zeros(1)}) == [lost]


@pytest.mark.slow
def test_fid_of_a_file_of_weights(images: Path, tmp_path: Path) -> None:
    tensors = inception_tensors()
    torch.save(tensors, tmp_path / "fid.pth")
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file(tensors, tmp_path / "fid.safetensors")
    few = write_images(tmp_path / "few", 2)
    result = score(few, ScoreOptions(features=tmp_path / "fid.pth", reference=few), "cpu")
    assert set(result.values) == {"fid"}
    assert result.values["fid"]["value"] < 1e-6
    assert "fewer than the 2048 features" in " ".join(result.warnings)
    assert any("kid is left out" in text for text in result.warnings)
    models = [open_features(tmp_path / name, "cpu") for name in ("fid.pth", "old.pth", "fid.safetensors")]
    features = [model.encode([drawn(1)[0], drawn(2, height=70)[0]]) for model in models]
    assert features[0].shape == (2, WIDTH)
    assert all(torch.equal(features[0], other) for other in features[1:])


def test_other_weights_are_not_taken_for_those_of_fid(dino: Path) -> None:
    with raises("evaluation.wrong-feature-weights", "model.safetensors"):
        open_features(dino / "model.safetensors", "cpu")


def test_pooling_of_inception_leaves_padding_out() -> None:
    """A constant image stays constant: padding would lower the borders of the average, and zeros win no maximum."""
    for block, width in ((InceptionA(8, 4), 8), (InceptionE(8, last=False), 8), (InceptionE(8, last=True), 8)):
        block.eval()
        pooled: list[torch.Tensor] = []
        block.branch_pool.register_forward_pre_hook(lambda module, inputs, pooled=pooled: pooled.append(inputs[0]))
        values = torch.full((1, width, 5, 5), -2.0)
        values[0, 0, 2, 2] = 1.0
        with torch.no_grad():
            block(values)
        assert pooled[0][0, 1].eq(-2).all()
        largest = isinstance(block, InceptionE) and bool(pooled[0][0, 0, 2, 2] == 1)
        assert largest == (isinstance(block, InceptionE) and block.pool.func is F.max_pool2d)


def test_results_are_json_and_a_page(clip: Path, dino: Path, videos: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in videos.iterdir())
    texts = ["a red kite <script>alert(1)</script>", "the dog", "a cat"]
    rows = [{"file": name, "prompt": text} for name, text in zip(names, texts, strict=True)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ScoreOptions(tmp_path / "p.jsonl", clip=clip, consistency=dino, features=dino, reference=videos)
    result = score(videos, options, "cpu")
    out = tmp_path / "out"
    file, page = write_scores(out, result)
    stored = json.loads(file.read_text())
    assert stored["fingerprint"] == result.fingerprint
    assert list(stored["scores"]) == ["clip_score", "frame_consistency_dinov2", "fd_dinov2"]
    assert stored["protocol"]["generation"] == "unknown"
    assert str(tmp_path) not in json.dumps(stored["protocol"]), "paths are not part of a protocol"
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert len(re.findall("<img ", text)) == 9, "three frames of each video"
    again = score(videos, options, "cpu")
    assert again.fingerprint == result.fingerprint
    other = write_clip(tmp_path / "other-clip", seed=5)
    changed = score(videos, ScoreOptions(tmp_path / "p.jsonl", clip=other), "cpu")
    assert changed.fingerprint != result.fingerprint


def refused_case(name: str, clip: Path, dino: Path, tmp: Path) -> tuple[Path, dict[str, Any]]:
    """Return the samples and the options of a case of bad input."""
    images = write_images(tmp / "i", 3)
    options: dict[str, Any] = {"features": dino, "reference": images}
    if name == "empty":
        return write_images(tmp / "e", 0), options
    if name == "missing":
        return tmp / "gone", options
    if name == "mixed":
        write_clips(images, 1)
    elif name == "broken":
        (images / "001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 50)
    elif name == "broken video":
        (write_clips(tmp / "v", 2) / "001.mp4").write_bytes(b"0" * 100)
        return tmp / "v", {"consistency": dino}
    elif name == "link":
        (tmp / "secret.png").write_bytes((images / "000.png").read_bytes())
        (images / "link.png").symlink_to(tmp / "secret.png")
    elif name == "one":
        return write_images(tmp / "o", 1), options
    elif name == "reference of one":
        options["reference"] = write_images(tmp / "o", 1)
    elif name == "lines":
        (tmp / "p.txt").write_text("a cat\n")
        return images, {"clip": clip, "prompts": tmp / "p.txt"}
    elif name == "names":
        (tmp / "p.json").write_text(json.dumps({"000.png": "a", "001.png": "b", "other.png": "c"}))
        return images, {"clip": clip, "prompts": tmp / "p.json"}
    elif name == "row":
        (tmp / "p.jsonl").write_text('{"file": "000.png"}\n')
        return images, {"clip": clip, "prompts": tmp / "p.jsonl"}
    elif name == "vbench":
        (tmp / "p.json").write_text(json.dumps([{"prompt_en": "a cat", "dimension": []}]))
        return images, {"clip": clip, "prompts": tmp / "p.json"}
    elif name == "no prompts":
        return images, {"clip": clip}
    elif name == "not clip":
        return images, {"clip": dino, "prompts": prompt_file(images, tmp / "p.json")}
    elif name == "images":
        return images, {"consistency": clip}
    elif name == "one frame":
        return write_clips(tmp / "v", 2, frames=1), {"consistency": dino}
    elif name == "nothing":
        return images, {}
    elif name == "saved name":
        return images, {"features": dino, "save_features": tmp / "f.pt"}
    elif name == "half":
        return images, {"features": dino}
    elif name == "type":
        (tmp / "m").mkdir()
        (tmp / "m" / "config.json").write_text('{"model_type": "bert"}')
        options["features"] = tmp / "m"
    elif name == "no model":
        options["features"] = images
    elif name == "pickled":
        np.savez(tmp / "s.npz", mu=np.array([print]), sigma=np.eye(1))
        options["reference"] = tmp / "s.npz"
    elif name == "shapes":
        np.savez(tmp / "s.npz", mu=np.zeros(3), sigma=np.eye(4))
        options["reference"] = tmp / "s.npz"
    elif name == "width":
        np.savez(tmp / "s.npz", mu=np.zeros(3), sigma=np.eye(3))
        options["reference"] = tmp / "s.npz"
    elif name == "not numpy":
        (tmp / "s.npz").write_bytes(b"PK\x03\x04")
        options["reference"] = tmp / "s.npz"
    elif name == "other model":
        metadata = {"kind": "clip", "digest": "0"}
        save_file({"features": torch.zeros(4, 16)}, tmp / "f.safetensors", metadata)
        options["reference"] = tmp / "f.safetensors"
    elif name == "not features":
        save_file({"x": torch.zeros(4)}, tmp / "f.safetensors")
        options["reference"] = tmp / "f.safetensors"
    elif name == "suffix":
        (tmp / "f.txt").write_text("")
        options["reference"] = tmp / "f.txt"
    return images, options


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("empty", "evaluation.not-a-sample-folder"),
        ("missing", "evaluation.no-such-folder"),
        ("mixed", "evaluation.not-a-sample-folder"),
        ("broken", "evaluation.unreadable-sample 001.png"),
        ("broken video", "evaluation.unreadable-sample 001.mp4"),
        ("link", "evaluation.sample-outside-folder link.png"),
        ("one", "evaluation.too-few-samples"),
        ("reference of one", "evaluation.too-few-samples"),
        ("lines", "evaluation.prompts-do-not-match"),
        ("names", "evaluation.prompts-do-not-match 002.png"),
        ("row", "evaluation.bad-prompt-row"),
        ("vbench", "evaluation.prompts-do-not-match 000.png"),
        ("no prompts", "evaluation.no-prompts"),
        ("not clip", "evaluation.not-clip"),
        ("images", "evaluation.consistency-of-images"),
        ("one frame", "evaluation.video-of-one-frame"),
        ("nothing", "evaluation.no-score-requested"),
        ("saved name", "evaluation.features-not-safetensors"),
        ("half", "evaluation.distance-needs-both"),
        ("type", "evaluation.unknown-feature-model"),
        ("no model", "evaluation.no-feature-model"),
        ("pickled", "evaluation.unreadable-reference"),
        ("shapes", "evaluation.unreadable-reference"),
        ("width", "evaluation.reference-of-other-model"),
        ("not numpy", "evaluation.unreadable-reference"),
        ("other model", "evaluation.reference-of-other-model"),
        ("not features", "evaluation.unreadable-reference"),
        ("suffix", "evaluation.no-reference"),
    ],
)
def test_bad_input_is_a_sentence(name: str, code: str, clip: Path, dino: Path, tmp_path: Path) -> None:
    folder, options = refused_case(name, clip, dino, tmp_path)
    with raises(code):
        score(folder, ScoreOptions(**options), "cpu")


def test_weights_that_lack_a_tensor_are_refused(clip: Path, dino: Path, tmp_path: Path) -> None:
    for name, folder in (("clip", clip), ("dino", dino)):
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        del tensors[next(key for key in tensors if "layer" in key)]
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        with raises("evaluation.wrong-feature-weights"):
            open_features(copy, "cpu")
    (copy / "model.safetensors").write_bytes((dino / "model.safetensors").read_bytes()[:-100])
    with raises("evaluation.unreadable-feature-model"):
        open_features(copy, "cpu")


def test_the_command_ends_with_code_2_and_writes_nothing_half(
    clip: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = prompt_file(images, tmp_path / "p.json")
    words = ["tessera", "score", str(images), "--clip", str(clip), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "the CLIP score needs the prompts" in capsys.readouterr().err
    assert not (tmp_path / "scores").exists()
    monkeypatch.setattr("sys.argv", [*words, "--prompts", str(prompts)])
    main_code = 0
    try:
        main()
    except SystemExit as ended:
        main_code = int(ended.code or 0)
    assert main_code == 0
    said = capsys.readouterr().out
    assert re.search(r"^clip_score [\d.]+", said, re.MULTILINE)
    assert sorted(os.listdir(tmp_path / "scores")) == ["scores.html", "scores.json"]


def test_prompts_of_file_names_are_those_of_vbench(tmp_path: Path) -> None:
    folder = write_clips(tmp_path / "v", 4, frames=2)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"{PROMPTS[number // 2]}-{number % 2}.mp4")
    entries = [{"prompt_en": text, "dimension": ["color"], "auxiliary_info": {"color": "red"}} for text in PROMPTS]
    (tmp_path / "VBench_full_info.json").write_text(json.dumps(entries))
    samples = read_samples(folder, tmp_path / "VBench_full_info.json")
    assert [sample.prompt for sample in samples.samples] == [*[PROMPTS[0]] * 2, *[PROMPTS[1]] * 2]
    assert samples.unsampled == 1
    assert Scores(samples).fingerprint == Scores(samples).fingerprint
