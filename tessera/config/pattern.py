"""Match module and parameter paths by the patterns of recipes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tessera.errors import TesseraError, nearest

_RANGE = re.compile(r"(\d+)-(\d+)")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*\.[A-Z]\w*")  # package folders of remote code may contain a dash
_MAX_RANGE = 100_000
_EXPERTS = "experts"  # name of the module with stacked experts in every model family


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to a regular expression for full paths."""
    if not pattern or pattern != pattern.strip() or ".." in pattern or pattern[0] == "." or pattern[-1] == ".":
        raise _not_a_pattern(pattern, "dots and spaces at an end, and two dots in a row, have no meaning")
    return re.compile(_expression(pattern))


def _expression(pattern: str) -> str:
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{":
            end = pattern.find("}", at)
            if end < 0 or "{" in pattern[at + 1 : end]:
                raise _not_a_pattern(pattern, "a brace is not closed")
            out.append(_group(pattern[at + 1 : end], pattern))
            at = end
        elif char == "}":
            raise _not_a_pattern(pattern, "a brace is not opened")
        elif char == "*":
            out.append("[^.]*")
        elif char == "?":
            out.append("[^.]")
        else:
            out.append(re.escape(char))
        at += 1
    return "".join(out)


def _group(body: str, pattern: str) -> str:
    options: list[str] = []
    for item in (part.strip() for part in body.split(",")):
        span = _RANGE.fullmatch(item)
        if item == "*":
            options.append("[^.]+")
        elif span:
            low, high = int(span[1]), int(span[2])
            if low > high or high - low > _MAX_RANGE:
                raise _not_a_pattern(pattern, f"the range {item} runs backwards or is too long")
            options.append("|".join(str(n) for n in range(high, low - 1, -1)))
        elif item and re.fullmatch(r"[\w\-]+", item):
            options.append(re.escape(item))
        else:
            raise _not_a_pattern(pattern, f"{{{body}}} is no range and no list of names")
    return f"(?:{'|'.join(options)})"


def _not_a_pattern(pattern: str, why: str) -> TesseraError:
    return TesseraError(
        f"this is not a path pattern: {pattern!r}: {why}",
        fix="write dotted names with groups such as {*}, {0-23} or {1,3}: text.layers.{0-3}.attn",
        code="recipe.not-a-pattern",
    )


def is_class_path(name: str) -> bool:
    """Return whether a name looks like the import path of a class: package.module.Class."""
    return _CLASS_PATH.fullmatch(name) is not None


def matches(pattern: str, path: str) -> bool:
    return compile_pattern(pattern).fullmatch(path) is not None


_CORRECT = "correct the pattern by the names that `tessera plan RECIPE --modules` lists"


def select(patterns: Sequence[str], paths: Iterable[str], where: str, fix: str = _CORRECT) -> list[str]:
    """Return the paths that match one of the patterns, in the order of `paths`; raise for a pattern without match.

    `fix`: how to correct such a pattern.
    """
    candidates = list(paths)
    chosen: set[str] = set()
    for pattern in patterns:
        matching = [path for path in candidates if matches(pattern, path)]
        if not matching:
            raise nothing_matches(pattern, candidates, where, fix)
        chosen.update(matching)
    return [path for path in candidates if path in chosen]


def nothing_matches(pattern: str, paths: Sequence[str], where: str, fix: str = _CORRECT) -> TesseraError:
    """Return the error for a pattern that matches none of the paths."""
    parts = pattern.split(".")
    if _EXPERTS in parts and not any(_EXPERTS in path.split(".") for path in paths):
        dense = ".".join(parts[: parts.index(_EXPERTS)])
        there = bool(dense) and any(matches(dense, path) for path in paths)
        return TesseraError(
            f"pattern {pattern!r} matches nothing: this model has no experts, its layers are dense",
            where=where,
            nearest=dense if there else nearest_path(dense, paths) if dense else None,
            fix="name the layers of the dense model, or choose a model with experts",
            code="recipe.pattern-matches-nothing",
        )
    return TesseraError(
        f"pattern {pattern!r} matches nothing",
        where=where,
        nearest=nearest_path(pattern, paths),
        fix=fix,
        code="recipe.pattern-matches-nothing",
    )


def select_trees(patterns: Sequence[str], paths: Iterable[str], where: str, fix: str = _CORRECT) -> list[str]:
    """Return paths like `select`; a pattern that matches a module also selects everything inside of it."""
    candidates = list(paths)
    above = {path: ancestors(path) for path in candidates}
    modules = sorted({module for parents in above.values() for module in parents})
    chosen = set(select(patterns, modules, where, fix))
    return [path for path in candidates if chosen.intersection(above[path])]


def ancestors(path: str) -> list[str]:
    """Return the paths of all modules around a path, and the path itself: a, a.b, a.b.c."""
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def home(path: str, modules: Iterable[str]) -> str | None:
    """Return the innermost of these modules that is `path` or contains it; None if there is none."""
    return max((m for m in modules if path == m or path.startswith(m + ".")), key=len, default=None)


def nearest_path(pattern: str, paths: Sequence[str]) -> str | None:
    """Return a corrected pattern: the most similar path, with the groups of `pattern` (such as {*}) as its numbers.

    A path's end, which other tools accept (`q_proj`, `experts.down_proj`), is completed to a pattern of full paths.
    """
    ends = [path for path in paths if f".{path}".endswith((f".{pattern}", f".{pattern.removesuffix('_proj')}"))]
    if ends and ends != [pattern]:
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", max(ends, key=lambda path: path.startswith("text.")))
    plain = re.sub(r"\{[^}]*\}", "0", pattern)
    suggestion = nearest(plain, paths)
    if suggestion is None:
        return None
    groups = iter(re.findall(r"\{[^}]*\}", pattern))
    return ".".join(next(groups, part) if part.isdigit() else part for part in suggestion.split("."))
