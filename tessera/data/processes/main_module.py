"""Classes that a user defined in the script that was started, as a worker process finds them.

The script is not run again in a worker, unless the work is made of its classes. Then it is imported, under another
name than `__main__`: but only if it keeps what it does behind `if __name__ == "__main__":`, or does nothing. A script
that would train again is refused.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tessera.core.errors import TesseraError

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class MainModule:
    path: Path
    module: str | None  # its real name, when it was started by `python -m`


def main_module() -> MainModule | None:
    """Of this process; None where there is no file (a notebook, `python -c`)."""
    module = sys.modules["__main__"]
    path = getattr(module, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    spec = getattr(module, "__spec__", None)
    return MainModule(Path(path).absolute(), None if spec is None else spec.name)


def load_main(main: MainModule | None, module: str, name: str) -> None:
    """Before `name` is looked up in `module`: makes `__main__` mean here what it means in the process of the user."""
    if module != "__main__" or hasattr(sys.modules["__main__"], name):
        return
    fix = "move it into a module of its own, or set data.workers=0"
    if main is None:
        raise TesseraError(f"{name} is defined where worker processes cannot find it: in no file", fix=fix)
    if _acts(main.path):
        raise TesseraError(
            f"{name} is defined in a script that worker processes cannot import: it would run again in each of them",
            where=str(main.path),
            fix=f'put what the script does under `if __name__ == "__main__":`, {fix}',
        )
    if main.module is not None:
        found = importlib.import_module(main.module)
    else:
        spec = importlib.util.spec_from_file_location("__mp_main__", main.path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules["__mp_main__"] = found  # the name by which the other side knows its own __main__ as well
        spec.loader.exec_module(found)
    sys.modules["__main__"] = found


def _acts(path: Path) -> bool:
    """Whether importing the file does more than to define things."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return True
    if any(isinstance(node, ast.If) and _mentions_name(node.test) for node in body):
        return False
    return any(not isinstance(node, _DEFINITIONS) and _calls(node) for node in body)


def _mentions_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))


def _calls(node: ast.stmt) -> bool:
    return any(isinstance(inner, (ast.Call, ast.Await, ast.With)) for inner in ast.walk(node))
