"""One door for Hugging Face folders, runs and checkpoints; one form of messages, whatever a picture comes as."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import model_tensors
from tessera.config.reader import dump_yaml
from tessera.config.run_config import load_config
from tessera.core.sample import Message, Part, Sample
from tessera.errors import TesseraError
from tessera.inference.load import load
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.models.qwen2_vl import SPEC
from tests.errors import raises
from tests.toys.chat_service import VOCABULARY, settings, write_tokenizer
from tests.toys.save_folder import save_folder


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a Hugging Face folder `hf` and as a run `run` with a checkpoint."""
    root = tmp_path_factory.mktemp("house")
    words = write_tokenizer(root / "words")
    config = SPEC.config.model_validate(settings())
    torch.manual_seed(0)
    module = SPEC.main.build(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    assert SPEC.processor is not None
    processor = SPEC.processor(config, words, min_pixels=64, max_pixels=4096)
    run = load_config(
        {
            "out": str(root),
            "model": {"family": "qwen2_vl", "config": settings(), "tokenizer": str(words)},
            "train": {"steps": 1},
            "data": {"max_image_pixels": 10_000, "processor": {"min_pixels": 64, "max_pixels": 4096}},
        }
    )
    processor.save(run.folder / "processor")
    (run.folder / "config.yaml").write_text(dump_yaml(run))
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(module).items()}
    manager = CheckpointManager(run.folder / "checkpoints", 2)
    manager.save(1, {name: torch.zeros_like(t) for name, t in tensors.items()}, {}, dump_yaml(run))
    manager.save(2, {**tensors, "optim.x.exp_avg": torch.ones(3)}, {}, dump_yaml(run))
    save_folder(root / "hf", model_tensors(module), SPEC.main.weight_map(config), config.to_hf(), finish=processor.save)
    picture().save(root / "cat.png")
    return root


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 28, 3), dtype=np.uint8))


def ask(image: Any, text: str = "what is in this picture") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def loaded(house: Path) -> tuple[LoadedModel, LoadedProcessor]:
    return load(house / "hf", device="cpu")


def test_every_holder_gives_the_same_model(house: Path, loaded: tuple[LoadedModel, LoadedProcessor]) -> None:
    model, processor = loaded
    batch = processor(ask(house / "cat.png"))
    logits = model(batch, logits=True)["logits"]
    assert logits.shape == (batch["tokens"].numel(), VOCABULARY)
    for place in ("run", "run/checkpoints/step-00000002"):
        other, its_processor = load(house / place, device="cpu")
        again = its_processor(ask(house / "cat.png"))
        assert torch.equal(again["tokens"], batch["tokens"])
        assert torch.equal(other(again)["logits"], logits)
    zeros, _ = load(house / "run" / "checkpoints" / "step-00000001", device="cpu")
    assert not torch.equal(zeros(batch)["logits"], logits)


def test_types_are_as_stored_or_as_asked(house: Path) -> None:
    assert next(load(house / "hf", "cpu")[0].module.parameters()).dtype == torch.float32
    assert next(load(house / "run", "cpu", "bfloat16")[0].module.parameters()).dtype == torch.bfloat16
    assert next(load(house / "hf", torch.device("cpu"), torch.float64)[0].parameters()).dtype == torch.float64
    with raises("model.unknown-dtype"):
        load(house / "hf", "cpu", "bfloat61")


def test_answers_are_text(house: Path, loaded: tuple[LoadedModel, LoadedProcessor]) -> None:
    model, processor = loaded
    answer = model.generate(processor(ask(house / "cat.png")), max_new_tokens=6)
    assert isinstance(answer, str)
    several = model.generate(processor([ask(house / "cat.png"), ask(picture(1)), ask(picture(2))]), max_new_tokens=6)
    assert isinstance(several, list)
    assert len(several) == 3
    assert several[0] == answer, "an answer does not depend on who else asks"
    grown: list[str] = []
    streamed = model.generate(processor(ask(house / "cat.png")), max_new_tokens=6, on_text=grown.append)
    assert "".join(grown) == streamed == answer
    with raises("generation.stream-of-several", "on_text"):
        model.generate(processor([ask(picture()), ask(picture())]), on_text=grown.append)
    free = [model.generate(processor(ask(picture())), 8, temperature=2.0, seed=s) for s in (1, 1, 2)]
    assert free[0] == free[1] != free[2]


def test_a_picture_is_a_picture(house: Path, loaded: tuple[LoadedModel, LoadedProcessor]) -> None:
    _, processor = loaded
    data = (house / "cat.png").read_bytes()
    batches = [processor(ask(form)) for form in (house / "cat.png", str(house / "cat.png"), picture(), data)]
    batches.append(processor(ask("cat.png"), root=house))
    batches.append(processor(ask("../words/../cat.png"), root=house / "words"))
    url = {"type": "image_url", "image_url": {"url": str(house / "cat.png")}}
    batches.append(processor([{"role": "user", "content": [url, {"type": "text", "text": "what is in this picture"}]}]))
    for batch in batches[1:]:
        assert torch.equal(batch["pixels"], batches[0]["pixels"])
        assert torch.equal(batch["tokens"], batches[0]["tokens"])


def test_samples_of_data_sets_stay_under_their_root(house: Path, loaded: tuple[LoadedModel, LoadedProcessor]) -> None:
    _, processor = loaded
    words = Part("text", "what is in this picture")

    def sample(path: str) -> Sample:
        return Sample("a", (Message("user", (Part("image", path), words)), Message("assistant", (words,))))

    batch = processor.prompt([(sample("cat.png"), house), (sample("cat.png"), house)])
    assert batch.segments["text"].bounds.numel() == 3
    assert torch.equal(processor.prompt([(sample("cat.png"), house)])["tokens"], processor(ask(picture()))["tokens"])
    with raises("media.outside-root"):
        processor.prompt([(sample(str(house / "cat.png")), house / "words")])


BAD: list[tuple[Any, str]] = [
    ("hello", "generation.bad-messages"),
    ([], "generation.bad-messages"),
    ([[]], "generation.bad-messages"),
    ([{"role": "usr", "content": "x"}], "generation.unknown-role"),
    ([{"role": "user"}], "generation.bad-messages"),
    ([{"role": "user", "content": 3}], "generation.bad-messages"),
    ([{"role": "user", "content": [{"type": "imgae", "image": "x"}]}], "generation.unknown-part"),
    ([{"role": "user", "content": [{"type": "image"}]}], "generation.bad-messages"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "generation.bad-messages"),
    ([{"role": "user", "content": "x"}, [{"role": "user", "content": "x"}]], "generation.bad-messages"),
    (ask(3.5), "generation.bad-messages"),
    (ask("https://example.org/cat.png"), "media.url-not-allowed"),
    (ask("data:image/png;base64,AAAA"), "media.unknown-format"),
    (ask("no-such.png"), "media.no-such-file"),
    (ask(b"not a picture"), "media.unknown-format"),
]


@pytest.mark.parametrize(("messages", "error"), BAD)
def test_bad_messages_are_explained(loaded: tuple[LoadedModel, LoadedProcessor], messages: Any, error: str) -> None:
    with raises(error):
        loaded[1](messages)


def test_limits_hold_for_every_form_of_a_picture(house: Path, tmp_path: Path) -> None:
    _, processor = load(house / "run", device="cpu")  # its recipe allows 10,000 pixels
    large = Image.new("RGB", (200, 100))
    large.save(tmp_path / "large.png")
    data = io.BytesIO()
    large.save(data, "PNG")
    for form in (large, tmp_path / "large.png", data.getvalue()):
        with raises("media.too-many-pixels", "10000"):
            processor(ask(form))


def test_what_is_no_model_is_told(house: Path, tmp_path: Path) -> None:
    with raises("weights.no-model-here"):
        load(tmp_path, "cpu")
    with raises("weights.folder-missing"):
        load(house / "hff", "cpu")
    (tmp_path / "model.pt").write_bytes(b"\x80\x04")
    with raises("weights.pickle-refused"):
        load(tmp_path / "model.pt", "cpu")
    (tmp_path / "config.yaml").write_text((house / "run" / "config.yaml").read_text())
    with raises("checkpoint.none-yet"):
        load(tmp_path, "cpu")


def test_a_model_is_saved_with_the_weights_it_has_now(house: Path, tmp_path: Path) -> None:
    model, processor = load(house / "hf", device="cpu")
    with torch.no_grad():
        next(model.module.parameters()).add_(0.5)
    folder = model.save(tmp_path / "saved", prove="never")
    again, other = load(folder, device="cpu")
    for ours, theirs in zip(model.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    talk = [{"role": "user", "content": "hi"}]
    assert torch.equal(processor(talk)["tokens"], other(talk)["tokens"])  # tokenizer and template came along
    with raises("adapter.none-in-model"):
        model.save(tmp_path / "adapters", adapters=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(TesseraError):
        model.save(tmp_path / "full", prove="never")
