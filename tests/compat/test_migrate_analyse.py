"""`tessera migrate analyse`: what is found in training code, what is not, and the reports."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera_compat.migration.analyse import Analysis, MigrationFinding, analyse
from tessera_compat.migration.reports import COLUMNS, csv_text, text_lines, to_html
from tessera_compat.migration.rules import RuleTable, rule_table
from tests.errors import raises

TOYS = Path(__file__).parents[1] / "toys"


def scripts(name: str) -> dict[str, str]:
    """Return the scripts of a file by their names. `#! KIND` marks what is to be reported."""
    parts = (TOYS / name).read_text(encoding="utf-8").split("=== ")
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts if part}


SCRIPTS = scripts("cuda_scripts.txt")
STRANGERS = scripts("stranger_scripts.txt")  # written without knowledge of the rules


def expected(text: str) -> Counter[tuple[int, str]]:
    marks = (line.partition("#!")[2] for line in text.splitlines())
    return Counter(
        (number, kind.strip()) for number, mark in enumerate(marks, 1) for kind in mark.split(",") if kind.strip()
    )


def reported(findings: list[MigrationFinding]) -> Counter[tuple[int, str]]:
    # Advice on fused operators is about code that works, and so not marked in the scripts.
    return Counter((finding.start, finding.kind) for finding in findings if finding.kind != "affinity")


def analysed(folder: Path, **files: str) -> Analysis:
    """Write files and analyse them. A double underscore in a name stands for a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return analyse(folder)


@pytest.mark.parametrize(("corpus", "count"), [(SCRIPTS, 30), (STRANGERS, 9)], ids=["written", "strangers"])
def test_precision_and_recall_on_the_written_scripts(corpus: dict[str, str], count: int, tmp_path: Path) -> None:
    assert len(corpus) == count
    hits = reports = marks = 0
    for name, text in corpus.items():
        path = tmp_path / f"script_{name}.py"  # a file named like a library would be that library
        path.write_text(text, encoding="utf-8")
        found_here, marked = reported(analyse(path).findings), expected(text)
        hits += (found_here & marked).total()
        reports += found_here.total()
        marks += marked.total()
        print(name, "missing", marked - found_here, "additional", found_here - marked)
    assert hits >= 0.95 * reports
    assert hits >= 0.95 * marks


@pytest.mark.parametrize("name", ["clean", "shadowed"])
def test_names_of_the_script_itself_are_not_reported(name: str, tmp_path: Path) -> None:
    assert reported(analysed(tmp_path, script=SCRIPTS[name]).findings) == Counter()


def test_re_exports_within_the_folder_are_followed(tmp_path: Path) -> None:
    result = analysed(
        tmp_path,
        package__INIT="from .ops import *\n",
        package__ops="from apex.optimizers import FusedAdam as Fast\nimport torch\n",
        train="from package import Fast\nimport package\nFast([])\npackage.ops.torch.nn.DataParallel(None)\n",
    )
    places = {(finding.file, finding.start, finding.operation) for finding in result.findings}
    assert ("train.py", 3, "apex.optimizers.FusedAdam") in places
    assert ("train.py", 4, "torch.nn.DataParallel") in places


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    result = analysed(
        tmp_path,
        a="from b import x\nfrom b import *\nx.cuda\n",
        b="from a import x\nfrom a import *\nimport a\na.b.a.b.x()\n",
    )
    assert not result.unread


def test_a_library_that_is_analysed_itself_is_no_other_library(tmp_path: Path) -> None:
    result = analysed(tmp_path, composer__INIT="x = 1\n", composer__core="import composer\ncomposer.x\nimport apex\n")
    assert [finding.operation for finding in result.findings] == ["apex"]


def test_callers_of_what_is_unsupported_are_listed(tmp_path: Path) -> None:
    result = analysed(
        tmp_path,
        build="import torch\ndef wrap(m):\n    return torch.nn.DataParallel(m)\ndef outer(m):\n    return wrap(m)\n",
        train="import build\ndef run():\n    build.outer(1)\nprint(len([]))\n",
    )
    assert [(row.file, row.start, row.operation) for row in result.callers] == [
        ("build.py", 5, "build.wrap"),
        ("train.py", 3, "build.outer"),
    ]
    assert "torch.nn.DataParallel" in result.callers[1].tip


BAD_FILES = {
    "python2.py": b"print 'x'\n",
    "null.py": b"x = 1\x00\n",
    "latin.py": "x = 'ü'\n".encode("latin-1"),
    "utf16.py": "x = 1\n".encode("utf-16"),
    "codec.py": b"# coding: no-such-codec\n",
    "deep.py": b"x = " + b"(" * 5000 + b")" * 5000 + b"\n",
    "large.py": b"#" * (5 << 20),
    "cells.ipynb": b"[1, 2]",
    "broken.ipynb": b"{",
}


def test_a_file_that_cannot_be_analysed_is_named_and_the_others_are_analysed(tmp_path: Path) -> None:
    root = tmp_path / "code"
    root.mkdir()
    for name, content in BAD_FILES.items():
        (root / name).write_bytes(content)
    (tmp_path / "secret.py").write_text("import apex\n")
    (root / "out.py").symlink_to(tmp_path / "secret.py")
    (root / "loop.py").symlink_to("loop.py")
    os.mkfifo(root / "pipe.py")
    (root / "good.py").write_text("import apex\n" + "x = 1" + " + 1" * 300 + "\n")
    (root / "declared.py").write_bytes("# coding: latin-1\nimport bmtrain  # ü\n".encode("latin-1"))
    result = analyse(root)
    assert {file.name for file in result.unread} == {*BAD_FILES, "out.py", "pipe.py"}
    assert {finding.file for finding in result.findings} == {"good.py", "declared.py"}
    reasons = {file.name: file.reason for file in result.unread}
    assert "Python 2" in reasons["python2.py"]
    assert "leads out" in reasons["out.py"]


def test_code_cells_of_a_notebook_are_analysed_by_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": "import apex"},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install x\n", "import torch\n", "torch?"]},
        {"cell_type": "code", "source": "%%bash\nrm -r /"},
        {"cell_type": "code", "source": "x = torch.ones(1)\nx.cuda()"},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    result = analyse(path)
    assert [(row.file, row.start, row.work) for row in result.findings] == [("book.ipynb#cell-4", 2, "line")]
    assert not result.unread


def test_launch_scripts_and_cuda_sources_are_reported(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "# CUDA_VISIBLE_DEVICES\nexport CUDA_VISIBLE_DEVICES=0\nnvidia-smi\ndeepspeed a.py\n"
    )
    (tmp_path / "add.cu").write_text("__global__ void add() {}\n")
    found_here = {(row.file, row.start, row.kind) for row in analyse(tmp_path).findings}
    assert found_here == {
        ("run.sh", 2, "device"),
        ("run.sh", 3, "device"),
        ("run.sh", 4, "library"),
        ("add.cu", 1, "source"),
    }


def test_reports_have_the_names_and_columns_of_ascends_analyser(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "<b>=x.py").write_text("import torch\ntorch.nn.DataParallel(1)\nx = 1\nx.cuda()\nimport bmtrain\n")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(code), "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "3 places" in done.output
    rows = {path.name: list(csv.reader(path.open())) for path in (tmp_path / "out").glob("*.csv")}
    assert {tuple(table[0]) for table in rows.values()} == {COLUMNS}
    assert COLUMNS == ("File", "Start Line", "End Line", "OP", "Tips")
    assert rows["unsupported_api.csv"][1][:4] == ["<b>=x.py", "2", "2", "torch.nn.DataParallel"]
    assert rows["cuda_op_list.csv"][1][3] == ".cuda"
    assert rows["framework_unsupported_op.csv"][1][3] == "bmtrain"
    page = (tmp_path / "out" / "analysis.html").read_text()
    assert "&lt;b&gt;=x.py" in page
    assert "<b>=x" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert json.loads((tmp_path / "out" / "analysis.json").read_text())["places"]["fix"] == 1
    again = CliRunner().invoke(app, ["migrate", "analyse", str(code), "-o", str(tmp_path / "out")])
    assert "output.already-exists" in str(again.exception)


def test_exit_codes_and_json_on_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import torch\ntorch.zeros(1).cuda()\n")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(path), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["findings"][0]["operation"] == ".cuda"
    with raises("job.file-missing", "nowhere"):
        analyse(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("")
    with raises("job.not-source-code", "a.txt"):
        analyse(tmp_path / "a.txt")


def test_formulas_and_control_characters_do_not_reach_a_spreadsheet_or_a_terminal(tmp_path: Path) -> None:
    assert list(csv.reader(io.StringIO(csv_text(("a",), [("=cmd()",), ("-1",)])))) == [["a"], ["'=cmd()"], ["'-1"]]
    (tmp_path / "a\x1b[31m.py").write_text("import apex\n")
    assert "\x1b" not in "".join(text_lines(analyse(tmp_path)))
    assert "\x1b" not in to_html(analyse(tmp_path))


def test_every_rule_has_a_source_and_is_reached_by_its_own_name() -> None:
    table: RuleTable = rule_table()
    for rule in table.rules:
        assert rule.tip
        assert rule.source
        assert (rule.work == "fix") == bool(rule.rename or rule.rewrite), rule
        assert all(table.by_name(name) is rule for name in rule.names), rule.names
    names = [name for rule in table.rules for name in rule.names]
    assert len(names) == len(set(names))


def test_names_that_fix_writes_exist_in_torch() -> None:
    import torch

    for rule in rule_table().rules:
        value = torch
        for part in rule.rename.split(".")[1:]:
            value = getattr(value, part)


def test_the_table_is_plain_data() -> None:
    file = Path(rule_table.__wrapped__.__code__.co_filename).with_name("rules.yaml")
    assert set(yaml.safe_load(file.read_text())) == {"sources", "rules"}


@pytest.mark.parametrize(
    "line",
    [
        "if args.cuda: pass",
        "use_cuda = args.cuda and not opt.cuda",
        "print('cuda', 'nccl')",
        "log = logging.getLogger('cuda')",
        "log.info('cuda')",
        "kinds = {'cuda': 1, 'nccl': 2}",
        "run = {'name': 'cuda', 'title': 'nccl'}",
        "plot(x, label='cuda', color='nccl')",
        "self.title = 'cuda'",
        "x[x > 0] = 1",
        "x.repeat_interleave(2, dim=1)",
        "torch.repeat_interleave(x, y, output_size=3)",
    ],
)
def test_lines_that_look_alike_are_not_reported(line: str, tmp_path: Path) -> None:
    assert analysed(tmp_path, script=f"import torch\n{line}\n").findings == []


def test_methods_of_classes_of_the_folder_are_not_torchs(tmp_path: Path) -> None:
    mesh = "class Mesh:\n    def cuda(self):\n        return self\n"
    use = "import torch\nfrom mesh import Mesh\nm = Mesh()\nm.cuda()\nMesh().cuda()\nmodel.cuda()\n"
    assert [finding.start for finding in analysed(tmp_path, mesh=mesh, use=use).findings] == [6]


@pytest.mark.parametrize(
    "line",
    [
        "x.to('cuda:%d' % rank)",
        "x.to('cuda:{}'.format(rank))",
        "x.to('cuda:' + str(rank))",
        "getattr(torch, 'cuda').empty_cache()",
        "dist.new_group(backend='cpu:gloo,cuda:nccl')",
        "env = dict(os.environ, CUDA_VISIBLE_DEVICES='1')",
        "pl.Trainer(accelerator='gpu')",
        "torch.set_default_tensor_type('torch.cuda.FloatTensor')",
        "torch.Tensor.cuda(x)",
    ],
)
def test_devices_in_other_spellings_are_reported(line: str, tmp_path: Path) -> None:
    findings = analysed(tmp_path, script=f"import torch\nimport torch.distributed as dist\n{line}\n").findings
    assert "device" in {finding.kind for finding in findings if finding.start == 3}


def test_a_module_that_is_imported_by_its_name_is_followed(tmp_path: Path) -> None:
    text = "import importlib\nbnb = importlib.import_module('bitsandbytes')\nbnb.optim.Adam8bit([])\n"
    assert [finding.operation for finding in analysed(tmp_path, script=text).findings] == [
        "bitsandbytes", "bitsandbytes.optim.Adam8bit",
    ]  # fmt: skip


def test_a_kernel_of_triton_is_one_place(tmp_path: Path) -> None:
    text = "import triton\nimport triton.language as tl\n@triton.jit\ndef add(x, B: tl.constexpr):\n    tl.load(x)\n"
    assert [finding.start for finding in analysed(tmp_path, script=text).findings] == [1, 2, 3]


@pytest.mark.parametrize("encoding", ["rot13", "zlib_codec", "klingon"])
def test_an_encoding_that_is_none_of_text_is_named(encoding: str, tmp_path: Path) -> None:
    result = analysed(tmp_path, odd=f"# coding: {encoding}\nimport torch\n", plain="import torch\nx.cuda()\n")
    assert [(file.name, encoding in file.reason) for file in result.unread] == [("odd.py", True)]
    assert len(result.findings) == 1


def test_nested_too_deeply_is_said(tmp_path: Path) -> None:
    (unread,) = analysed(tmp_path, deep="x = " + "-" * 50000 + "1\n").unread
    assert "nested too deeply" in unread.reason or "recursion" in unread.reason


def test_a_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with raises("job.not-source-code", str(tmp_path)):
        analyse(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    result = analysed(tmp_path, plain="import torch\nx.cuda()\n")
    assert [file.name for file in result.unread] == ["closed"]
    assert len(result.findings) == 1


def test_commands_of_a_notebook_are_read_as_a_launch_script(tmp_path: Path) -> None:
    cells = ["!nvidia-smi", "%env CUDA_VISIBLE_DEVICES=0", "%%time\nx.cuda()", "%%bash\nexport NCCL_P2P_DISABLE=1"]
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    (tmp_path / "note.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    places = [(finding.file.partition("#cell-")[2], finding.start) for finding in analyse(tmp_path).findings]
    assert places == [("1", 1), ("2", 1), ("3", 2), ("4", 2)]
    assert analyse(tmp_path).estimate()[0].startswith("1 file, ")
    assert analyse(tmp_path).estimate()[-1] == "4 places in 1 file left after --fix"
