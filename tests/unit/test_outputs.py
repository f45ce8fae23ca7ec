"""Models return outputs by name; a task reads them, and one that is not given is an error before training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessera.config.run_config import load_config
from tessera.core.outputs import HIDDEN, LOGITS, Projection, hidden_of, projection
from tessera.errors import TesseraError
from tessera.tasks.language import LanguageTask
from tessera.training.setup import build_meta_model, check_reads
from tests.errors import raises
from tests.toys import moe_decoder, two_encoders
from tests.toys.two_head_task import TwoHeadTask

CONFIG = two_encoders.TwoEncoderConfig(layers=3, codes=12)


def test_a_model_gives_every_head_and_the_hidden_states_that_a_batch_asks_for() -> None:
    torch.manual_seed(0)
    model = two_encoders.build(CONFIG)
    batch = two_encoders.example(CONFIG, 32)
    states: dict[int, torch.Tensor] = {}
    assert model.text is not None
    for index, layer in enumerate(model.text.layers):
        layer.register_forward_hook(lambda module, args, out, index=index: states.__setitem__(index, out))
    assert model(batch).keys() == {LOGITS, two_encoders.CODES}
    names = (HIDDEN, hidden_of("text.layers.2"), hidden_of("text.layers.0"))
    outputs = model(replace(batch, outputs=names))
    assert outputs.keys() == {LOGITS, two_encoders.CODES, *names}
    hidden, head = outputs[LOGITS]
    assert head is model.head
    assert torch.equal(outputs[HIDDEN], hidden)
    assert torch.equal(outputs[names[1]], states[2])
    assert torch.equal(outputs[names[2]], states[0])
    logits = model(batch, logits=True)
    assert torch.equal(logits[LOGITS], head(hidden))
    assert isinstance(logits[two_encoders.CODES], Projection)
    with raises("task.layer-on-other-stage"):
        model(replace(batch, outputs=(hidden_of("text.layers.3"),)))


def test_a_task_that_reads_what_a_family_does_not_give_is_refused_before_anything_is_built() -> None:
    recipe = {
        "model": {"family": "tests.toys.moe_decoder", "preset": "tiny"},
        "data": {"kind": "tests.toys.token_rows", "length": 32},
        "train": {"steps": 1, "global_batch": 4, "device": "cpu", "task": "tests.toys.two_head_task"},
    }
    with raises("task.output-not-given") as caught:
        build_meta_model(load_config(recipe), 1)
    assert tuple(caught.value.allowed or ()) == moe_decoder.SPEC.outputs
    check_reads(TwoHeadTask(), two_encoders.SPEC, where="train.task")
    check_reads(TwoHeadTask(), replace(moe_decoder.SPEC, outputs=None), where="train.task")  # it declares none


def test_an_output_that_a_model_did_not_return_is_an_error_that_lists_those_it_did() -> None:
    with pytest.raises(TesseraError) as caught:
        projection({"latents": torch.zeros(1)}, LOGITS)
    assert caught.value.allowed == ["latents"]
    with raises("task.output-kind"):
        projection({LOGITS: torch.zeros(1)}, LOGITS)
    with raises("task.missing-output"):
        LanguageTask().losses(torch.zeros(1), two_encoders.example(CONFIG, 8))  # type: ignore[arg-type]
