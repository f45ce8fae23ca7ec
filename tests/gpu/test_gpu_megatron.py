"""The script of seed 004 and its parallel layers on an accelerator."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

from tessera_compat.run import run_script

SCRIPT = Path(__file__).parents[1] / "acceptance" / "seed_004_script.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_the_script_of_seed_004_trains_on_the_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.read_text(encoding="utf-8").replace("params_dtype=torch.float16", "params_dtype=torch.float32")
    script.write_text(text, encoding="utf-8")
    said = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(said):
        names = run_script(script, ["1", "1"])
    assert "Total parameters: 6960" in said.getvalue()
    assert {parameter.device.type for parameter in names["gpt_model"].parameters()} != {"cpu"}
    history = names["history"]
    assert history[-1] < history[0] - 0.05
    assert "Successfully loaded the model" in said.getvalue()
