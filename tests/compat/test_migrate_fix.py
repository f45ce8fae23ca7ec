"""`tessera migrate analyse --fix`: the patched copy runs on any device, and everything else stays as it was."""

from __future__ import annotations

import ast
import csv
import io
import os
import random
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
import transformers
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera_compat.migration.analyse import analyse
from tessera_compat.migration.fix import FixedFile, fix
from tessera_compat.migration.names import Resolver, parse
from tessera_compat.migration.patched_copy import COLUMNS
from tessera_compat.migration.rules import rule_table
from tessera_compat.migration.scan import Scanner
from tessera_compat.migration.sources import SourceFile
from tests.compat.test_migrate_analyse import SCRIPTS
from tests.errors import raises


def fixed(text: str) -> FixedFile:
    program = parse(SourceFile(Path("script.py"), "script.py", "python", text), Path())
    resolver = Resolver([program])
    return fix(Scanner(program, resolver, rule_table()).run(), resolver)


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def check(text: str) -> str:
    """Return the fixed text, after checks that hold for every program."""
    after = fixed(text).after
    compile(after, "script.py", "exec")
    assert fixed(after).after == after
    assert comments(after) == comments(text)
    return after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x.cuda()", "x.to(ACCELERATOR)"),
        ("if x.device.type == 'cuda': pass", "if x.device.type == ACCELERATOR.type != \"cpu\": pass"),
        ("y = device.type != 'cuda'", "y = (ACCELERATOR.type == \"cpu\" or device.type != ACCELERATOR.type)"),
        ("y = 'cuda' in str(device)", "y = (ACCELERATOR.type != \"cpu\" and ACCELERATOR.type in str(device))"),
        ("x.to('cuda:%d' % i)", "x.to((ACCELERATOR.type + ':%d') % i)"),
        ("x.to('cuda:{}'.format(i))", "x.to((ACCELERATOR.type + ':{}').format(i))"),
        ("f = lambda storage, loc: storage.cuda(0)",
         "f = lambda storage, loc: storage.to(device=torch.device(ACCELERATOR.type, 0))"),
        ("x.cuda( non_blocking = True )", "x.to(ACCELERATOR,  non_blocking = True )"),
        ("x.cuda(0)", "x.to(torch.device(ACCELERATOR.type, 0))"),
        ("x.cuda(args.local_rank, True)", "x.to(torch.device(ACCELERATOR.type, args.local_rank), non_blocking=True)"),
        ("x.cuda(device=device)", "x.to(device=device)"),
        ("(x # why\n.cuda())", "(x # why\n.to(ACCELERATOR))"),
        ("x.to('cuda:1')", 'x.to(f"{ACCELERATOR.type}:1")'),
        ("x.to(f'cuda:{rank}')", "x.to(f'{ACCELERATOR.type}:{rank}')"),
        (
            "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
            "device = ACCELERATOR.type if torch.accelerator.is_available() else 'cpu'",
        ),
        ("ok = not x.is_cuda", 'ok = not (x.device.type != "cpu")'),
        ("torch.cuda.amp.autocast(False)", "torch.autocast(ACCELERATOR.type, enabled=False)"),
        (
            "torch.cuda.amp.GradScaler(\n    init_scale=2.0,\n)",
            "torch.amp.GradScaler(ACCELERATOR.type, \n    init_scale=2.0,\n)",
        ),
        (
            "torch.distributed.init_process_group('nccl')",
            "torch.distributed.init_process_group("
            "torch.distributed.get_default_backend_for_device(ACCELERATOR))",
        ),
        ("f(torch.cuda.synchronize)", "f(torch.accelerator.synchronize)"),
        ("a = x.cuda(); b = torch.cuda.device_count()", "a = x.to(ACCELERATOR); b = torch.accelerator.device_count()"),
        ("ö = 'ü' + str(x.cuda())", "ö = 'ü' + str(x.to(ACCELERATOR))"),
    ],
)  # fmt: skip
def test_a_call_is_rewritten(before: str, after: str) -> None:
    text = check(f"import torch\n{before}\n")
    assert text.replace('\nACCELERATOR = torch.accelerator.current_accelerator() or torch.device("cpu")\n', "") == (
        f"import torch\n{after}\n"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("f = x.cuda", "not called there"),
        ("x.cuda(*args)", "contain * or **"),
        ("x.cuda(None)", "None is the current device"),
        ("print(f'{x.cuda()}')", ""),
        ("kinds = {0: 'cuda'}", "may not name a device"),
        ("if backend == 'nccl': pass", "backend of the device"),
        ("torch.cuda.Event(True)", "name its arguments"),
        ("def f(torch): return torch.y.cuda()", "not the module"),
    ],
)
def test_what_cannot_be_rewritten_stays_and_is_listed(line: str, reason: str) -> None:
    text = f"import torch\n{line}\n"
    result = fixed(text)
    if reason:
        assert result.after == text
        assert [change.operation for change in result.changes] == ["KEEP"]
        assert reason in result.changes[0].message
    compile(result.after, "script.py", "exec")


def test_the_constant_follows_the_imports_and_its_name_is_free() -> None:
    text = (
        '"""Docs."""\nfrom __future__ import annotations\nimport os; x = (\n  1)\nACCELERATOR = 3\nx.cuda\n'
        "import torch\ndef f(y):\n    return y.cuda()\n"
    )
    lines = check(text).splitlines()
    assert lines[4:7] == [
        "import torch",
        "",
        'TORCH_ACCELERATOR = torch.accelerator.current_accelerator() or torch.device("cpu")',
    ]
    assert lines[-1] == "    return y.to(TORCH_ACCELERATOR)"


STATEMENTS = (
    *("x = x.cuda()  # to the device", "y = f(x.cuda(non_blocking=True), 'cuda')", "z = x.to('cuda:0') ; w = 'cuda'"),
    *(
        "with torch.cuda.amp.autocast(dtype=torch.float16):  # mixed\n        y = 1",
        "print(f'{x} cuda:{y}', x.is_cuda)",
    ),
    *("torch.cuda.manual_seed_all(\n        1  # seed\n    )", "y = [a.cuda(i) for i, a in enumerate(x)]", "pass"),
    *("y = lambda rank: torch.device(f'cuda:{rank}')", "x = 'é' ; torch.cuda.empty_cache()", "assert x.is_cuda"),
    *("del x\n    x = torch.zeros(1, device='cuda' if torch.cuda.is_available() else 'cpu')", "'cuda'"),
    *("if x.device.type == 'cuda': pass  # 中文", "s = torch.cuda.amp.GradScaler(enabled=False)", "y = -x.cuda() ** 2"),
    *("y = x.cuda() .cuda().to( 'cuda' )", "x = (\n      x\n      .cuda()  # one\n      .cuda(0)\n    )", "x.cuda"),
)
IMPORTS = ("import torch", "import os, torch  # both", "import torch as t\nimport torch", "from torch import nn", "")
HEADS = (
    "",
    "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n",
    '"""Docs."""\n',
    "from __future__ import annotations\n",
)


def random_program(seed: int) -> str:
    chance = random.Random(seed)
    parts = [chance.choice(HEADS), chance.choice(IMPORTS), "\n" * chance.randint(0, 3)]
    for number in range(chance.randint(1, 4)):
        decorator = chance.choice(("", "@staticmethod\n", "@torch.no_grad()\n"))
        parts.append(f"\n{decorator}def f{number}(x, device='cuda'):  # {number}\n")
        parts += [f"    {chance.choice(STATEMENTS)}\n" for _ in range(chance.randint(1, 6))]
    text = "".join(parts)
    text = text.rstrip("\n") if chance.random() < 0.2 else text
    return text.replace("\n", "\r\n") if chance.random() < 0.2 else text


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 400), marks=pytest.mark.slow)])
def test_random_programs_compile_after_it_and_a_second_time_changes_nothing(seeds: range) -> None:
    for seed in seeds:
        before = random_program(seed)
        after = check(before)
        assert ("\r\n" in before) == ("\r\n" in after)
        assert after.count("\r\n") in (0, after.count("\n"))
        # What was inserted is the constant and the import; every other line is rewritten in its place or equal.
        inserted = [
            line for line in after.splitlines() if line.startswith(("ACCELERATOR =", "import torch")) or not line
        ]
        assert len(after.splitlines()) - len(before.splitlines()) <= len(inserted)


def library_files(libraries: list[Any], share: int) -> list[Path]:
    roots = [Path(str(module.__file__)).parent for module in libraries]
    files = [path for root in roots for path in sorted(root.rglob("*.py")) if path.stat().st_size < 200_000]
    return random.Random(share).sample(files, share)


@pytest.mark.parametrize(
    ("libraries", "share"),
    [
        ([accelerate], 15),
        pytest.param([accelerate, diffusers, peft, transformers, torch], 1500, marks=pytest.mark.slow),
    ],
    ids=["one", "all"],
)
def test_files_of_installed_libraries_parse_and_a_second_time_changes_nothing(libraries: list[Any], share: int) -> None:
    changed = 0
    for path in library_files(libraries, share):
        text = path.read_text(encoding="utf-8")
        try:
            ast.parse(text)
        except SyntaxError:  # torch ships templates that are no Python
            continue
        after = fixed(text).after
        changed += after != text
        if after != text:
            check(text)
    assert changed


def test_fixed_scripts_run_on_this_machine(tmp_path: Path) -> None:
    names = ("amp_module", "devices", "aliases", "inner_imports")
    for name in names:
        text = fixed(SCRIPTS[name]).after
        lines = [line for line in text.splitlines() if "torch.load" not in line and "DataParallel" not in line]
        scope: dict[str, object] = {}
        exec(compile("\n".join(lines), name, "exec"), scope)
        if name == "amp_module":
            assert scope["f"](torch.ones(2)).tolist() == [1, 1]  # type: ignore[operator]
        if name == "inner_imports":
            assert len(scope["train"](use_fused=False)[1]) == 0  # type: ignore[operator]


def analyse_again(code: Path, target: Path) -> None:
    CliRunner().invoke(app, ["migrate", "analyse", str(code), "--fix", str(target)], catch_exceptions=False)


def test_a_patched_copy_has_a_diff_and_a_list_of_changes_and_the_original_stays(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / "data").mkdir()
    before = "# coding: latin-1\nimport torch  # ü\nx = torch.ones(1).cuda()".encode("latin-1")
    (code / "train.py").write_bytes(before)
    (code / "data" / "a.txt").write_text("kept")
    (tmp_path / "secret").write_text("")
    (code / "link").symlink_to(tmp_path / "secret")
    (code / "alias.py").symlink_to("train.py")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(code), "--fix", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "not copied: link" in done.output
    copy = tmp_path / "out" / "code"
    assert sorted(path.name for path in copy.iterdir()) == ["alias.py", "data", "train.py"]
    assert (code / "train.py").read_bytes() == before
    after = (copy / "train.py").read_bytes().decode("latin-1")
    assert "ü" in after
    assert after.endswith("x = torch.ones(1).to(ACCELERATOR)")
    diff = (tmp_path / "out" / "changes.diff").read_text()
    for line in ("-x = torch.ones(1).cuda()", "+x = torch.ones(1).to(ACCELERATOR)"):
        assert f"{line}\n\\ No newline at end of file\n" in diff
    rows = list(csv.reader((tmp_path / "out" / "change_list.csv").open()))
    assert tuple(rows[0]) == COLUMNS == ("File", "Start Line", "End Line", "Operation Type", "Message")
    assert [row[:4] for row in rows[1:]] == [["train.py", "3", "3", "MODIFY"], ["train.py", "3", "4", "INSERT"]]
    assert analyse(copy).count("fix") == 0
    assert all(file.after == file.before for file in analyse(copy).fixed)
    with raises("output.already-exists", "out"):
        CliRunner().invoke(
            app, ["migrate", "analyse", str(code), "--fix", str(tmp_path / "out")], catch_exceptions=False
        )
    with raises("output.inside-source", "contain"):
        analyse_again(code, code / "new")
    assert not (code / "new").exists()


def test_a_single_file_is_copied_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.ones(1).cuda()\n")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(path), "--fix", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "ACCELERATOR" in (tmp_path / "out" / "train.py").read_text()


def test_a_file_whose_new_text_would_not_parse_stays_as_it_was() -> None:
    result = fixed("import torch\nx.cuda()\n")
    assert replace(result, after=result.before).diff() == ""


def test_many_places_of_one_line_are_rewritten() -> None:
    count = 4000
    after = fixed("import torch\nx = [" + "y.cuda()," * count + "]\n").after
    assert after.count("y.to(ACCELERATOR)") == count


def test_a_name_that_is_not_utf8_can_be_written(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / os.fsdecode(b"bad\xff.py")).write_text("import torch\nx.cuda()\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(root), "--fix", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "bad" in (tmp_path / "out" / "change_list.csv").read_text(encoding="utf-8")
