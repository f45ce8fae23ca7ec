"""Environment variables of other people's launch scripts: honoured, passed on or explained; bad values refused."""

from __future__ import annotations

import re
import tomllib

import pytest

from tessera.errors import TesseraError
from tessera_compat.environment import VARIABLES, check_environment, job_settings, prepare_rank
from tests.acceptance.items import ROOT

# What a launch script of MindSpeed-MM exports.
SCRIPT = {
    "ASCEND_SLOG_PRINT_TO_STDOUT": "0",
    "ASCEND_GLOBAL_LOG_LEVEL": "3",
    "TASK_QUEUE_ENABLE": "2",
    "COMBINED_ENABLE": "1",
    "CPU_AFFINITY_CONF": "1",
    "HCCL_CONNECT_TIMEOUT": "1200",
    "NPU_ASD_ENABLE": "0",
    "ASCEND_LAUNCH_BLOCKING": "0",
    "ACLNN_CACHE_LIMIT": "100000",
    "MULTI_STREAM_MEMORY_REUSE": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_every_variable_of_a_script_is_explained_in_one_line() -> None:
    lines = check_environment({**SCRIPT, "HOME": "/home/me"})
    silent = {"CPU_AFFINITY_CONF", "TOKENIZERS_PARALLELISM"}  # honoured: nothing to say
    assert {line.split("=")[0] for line in lines} == set(SCRIPT) - silent
    assert all("\n" not in line for line in lines)
    assert "TASK_QUEUE_ENABLE=2: passed on" in "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TASK_QUEUE_ENABLE", "3"),
        ("TASK_QUEUE_ENABLE", "on"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "0"),
        ("HCCL_CONNECT_TIMEOUT", "soon"),
        ("CPU_AFFINITY_CONF", "7"),
        ("ASCEND_LAUNCH_BLOCKING", "yes"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(name: str, value: str) -> None:
    with pytest.raises(TesseraError, match=name):
        check_environment({name: value})


def test_unknown_names_of_the_same_kind_are_said_to_be_passed_on() -> None:
    (line,) = check_environment({"HCCL_CONECT_TIMEOUT": "1200"})
    assert "did you mean HCCL_CONNECT_TIMEOUT?" in line
    assert check_environment({"ASCEND_PROCESS_LOG_PATH": "/x"})[0].endswith("Tessera does not read it")


def test_timeouts_of_a_job_become_settings() -> None:
    assert job_settings(SCRIPT) == {"parallel.join_timeout_s": 1200.0}
    both = job_settings({"HCCL_EXEC_TIMEOUT": "1800", "HCCL_CONNECT_TIMEOUT": "0"})
    assert both == {"parallel.timeout_s": 1800.0}


def test_a_rank_without_a_wish_is_left_alone() -> None:
    assert prepare_rank({"TASK_QUEUE_ENABLE": "2"}) == []
    assert prepare_rank({"CPU_AFFINITY_CONF": "0,npu0:0-3"}) == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("coming-from-mindspeed-mm.md", {"honoured": "honoured", "passed on": "passed on", "no effect": "no effect"}),
        ("coming-from-mindspeed-mm.zh.md", {"honoured": "生效", "passed on": "传递", "no effect": "无作用"}),
    ],
)
def test_the_pages_have_every_variable(page: str, words: dict[str, str]) -> None:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z_0-9]+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert {name: words[variable.treatment] for name, variable in VARIABLES.items()} == rows


def test_the_pages_name_the_versions_that_are_needed() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(one for one in needed["dependencies"] if one.startswith("torch>"))
    for page in (ROOT / "docs" / "how-to").glob("coming-from-*.md"):
        text = page.read_text(encoding="utf-8")
        for bounds in (needed["requires-python"], torch):
            first, major, beyond = re.findall(r">=([\d.]+),<(\d+)\.(\d+)", bounds)[0]
            last = f"{major}.{int(beyond) - 1}"
            assert re.search(rf"\b{re.escape(first)} (?:to|到) {re.escape(last)}\b", text), (page.name, bounds)
