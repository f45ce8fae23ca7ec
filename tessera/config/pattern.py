"""Match module and parameter paths: patterns of recipes, and regular expressions of foreign files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from tessera.errors import TesseraError, nearest

_RANGE = re.compile(r"(\d+)-(\d+)")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*\.[A-Z]\w*")  # a folder of remote code may have a dash in its name
_MAX_RANGE = 100_000
_EXPERTS = "experts"  # what modules of stacked experts are called in every family


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the pattern as a regular expression over whole paths."""
    if not pattern or pattern != pattern.strip() or ".." in pattern or pattern[0] == "." or pattern[-1] == ".":
        raise TesseraError(
            f"not a path pattern: {pattern!r}",
            fix="write dotted names, such as text.layers.{0-3}.attn",
            code="recipe.not-a-pattern",
        )
    return re.compile(_expression(pattern))


def _expression(pattern: str) -> str:
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{":
            end = pattern.find("}", at)
            if end < 0 or "{" in pattern[at + 1 : end]:
                raise TesseraError(
                    f"brace not closed in pattern {pattern!r}",
                    fix="groups look like {*}, {0-23} or {1,3}",
                    code="recipe.not-a-pattern",
                )
            out.append(_group(pattern[at + 1 : end], pattern))
            at = end
        elif char == "}":
            raise TesseraError(
                f"brace not opened in pattern {pattern!r}",
                fix="groups look like {*}, {0-23} or {1,3}",
                code="recipe.not-a-pattern",
            )
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
                raise TesseraError(
                    f"range {item} in pattern {pattern!r} runs backwards or is too long", code="recipe.not-a-pattern"
                )
            options.append("|".join(str(n) for n in range(high, low - 1, -1)))
        elif item and re.fullmatch(r"[\w\-]+", item):
            options.append(re.escape(item))
        else:
            raise TesseraError(
                f"group {{{body}}} in pattern {pattern!r} is not {{*}}, a range or a list", code="recipe.not-a-pattern"
            )
    return f"(?:{'|'.join(options)})"


def is_class_path(name: str) -> bool:
    """Return whether a name looks like the import path of a class: package.module.Class."""
    return _CLASS_PATH.fullmatch(name) is not None


def matches(pattern: str, path: str) -> bool:
    return compile_pattern(pattern).fullmatch(path) is not None


def select(patterns: Sequence[str], paths: Iterable[str], where: str) -> list[str]:
    """Return the paths that any pattern matches, in the order of `paths`. A pattern that matches nothing is an
    error."""
    candidates = list(paths)
    chosen: set[str] = set()
    for pattern in patterns:
        matching = [path for path in candidates if matches(pattern, path)]
        if not matching:
            raise nothing_matches(pattern, candidates, where)
        chosen.update(matching)
    return [path for path in candidates if path in chosen]


def nothing_matches(pattern: str, paths: Sequence[str], where: str) -> TesseraError:
    """Return the error of a pattern that matches none of the known paths."""
    parts = pattern.split(".")
    if _EXPERTS in parts and not any(_EXPERTS in path.split(".") for path in paths):
        dense = ".".join(parts[: parts.index(_EXPERTS)])
        there = bool(dense) and any(matches(dense, path) for path in paths)
        return TesseraError(
            f"pattern {pattern!r} matches nothing: this model has no experts, its layers are dense",
            where=where,
            nearest=dense if there else nearest_path(dense, paths) if dense else None,
            code="recipe.pattern-matches-nothing",
        )
    return TesseraError(
        f"pattern {pattern!r} matches nothing",
        where=where,
        nearest=nearest_path(pattern, paths),
        code="recipe.pattern-matches-nothing",
    )


def absent_members(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return what the groups of a pattern list and no path has, of a pattern that matches something: 2-7 of
    `layers.{0-7}` where there are two layers."""
    candidates = [path for path in paths if matches(pattern, path)]
    absent: list[str] = []
    for group in re.finditer(r"\{([^}]*)\}", pattern) if candidates else ():
        before, after = pattern[: group.start()], pattern[group.end() :]
        listed = _members(group[1])
        # Each group by itself: the others may be anything that they list.
        expression = re.compile(f"{_expression(before)}({_group(group[1], pattern)}){_expression(after)}")
        there = {match[1] for path in candidates if (match := expression.fullmatch(path)) is not None}
        absent += _ranges([member for member in listed if member not in there])
    return absent


def _members(body: str) -> list[str]:
    """Return the names and numbers that a group lists; none where it takes any."""
    items: list[str] = []
    for item in (part.strip() for part in body.split(",")):
        span = _RANGE.fullmatch(item)
        if item == "*":
            return []
        items += [item] if span is None else map(str, range(int(span[1]), int(span[2]) + 1))
    return items


def _ranges(members: Sequence[str]) -> list[str]:
    """Return names as they are, and numbers that follow each other as a range."""
    ranges: list[str] = []
    for member in members:
        first, _, last = ranges[-1].partition("-") if ranges else ("", "", "")
        if member.isdigit() and (last or first).isdigit() and int(member) == int(last or first) + 1:
            ranges[-1] = f"{first}-{member}"
        else:
            ranges.append(member)
    return ranges


def select_trees(patterns: Sequence[str], paths: Iterable[str], where: str) -> list[str]:
    """Return the paths like `select`, where a pattern that names a module also matches everything below it."""
    candidates = list(paths)
    above = {path: ancestors(path) for path in candidates}
    modules = sorted({module for found in above.values() for module in found})
    chosen = set(select(patterns, modules, where))
    return [path for path in candidates if chosen.intersection(above[path])]


def ancestors(path: str) -> list[str]:
    """Return the path of every module that a path lies in, and the path itself."""
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def home(path: str, modules: Iterable[str]) -> str | None:
    """Return the innermost of the modules that a path is, or lies in."""
    return max((m for m in modules if path == m or path.startswith(m + ".")), key=len, default=None)


def nearest_path(pattern: str, paths: Sequence[str]) -> str | None:
    """Return the existing path most similar to the pattern, with the pattern's groups kept where the path has
    numbers. The end of a path, as other tools take it (`q_proj`, `experts.down_proj`), is completed to paths that end
    in it."""
    ends = [path for path in paths if f".{path}".endswith((f".{pattern}", f".{pattern.removesuffix('_proj')}"))]
    if ends and ends != [pattern]:
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", max(ends, key=lambda path: path.startswith("text.")))
    plain = re.sub(r"\{[^}]*\}", "0", pattern)
    suggestion = nearest(plain, paths)
    if suggestion is None:
        return None
    groups = iter(re.findall(r"\{[^}]*\}", pattern))
    return ".".join(next(groups, part) if part.isdigit() else part for part in suggestion.split("."))


_SECONDS = 20.0
_MAX_CHARACTERS = 1000
_MAX_PATTERNS = 20_000
# Letters, digits and what stands for itself or for one character: there is one way at most in which these match.
_PLAIN = re.compile(r"(?:[\w.^$-]|\\[.\-_])*")
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = {}
compiled = [re.compile(p) for p in patterns]
for name in names:
    found[name] = next((n for n, p in enumerate(compiled) if p.match(name)), None)
json.dump(found, sys.stdout)
"""


def first_matches(
    written: Sequence[str],
    names: Collection[str],
    *,
    within: str = "{}",
    where: str,
    seconds: float = _SECONDS,
) -> dict[str, int | None]:
    """Return for each name the number of the first pattern that matches at its beginning, as `re.match` does; None
    if none does. `within`: a template whose braces are replaced by each pattern."""
    patterns = [within.replace("{}", pattern) for pattern in written]
    if len(patterns) > _MAX_PATTERNS:
        raise TesseraError(
            f"{len(patterns)} regular expressions",
            where=where,
            allowed=[f"{_MAX_PATTERNS} at most"],
            code="recipe.too-many-expressions",
        )
    for pattern in patterns:
        if len(pattern) > _MAX_CHARACTERS:
            raise TesseraError(
                f"a regular expression of {len(pattern)} characters: {pattern[:60]}...",
                where=where,
                code="recipe.expression-too-long",
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise TesseraError(
                f"not a regular expression: {pattern!r}: {error}", where=where, code="recipe.not-an-expression"
            ) from None
    if all(map(_PLAIN.fullmatch, written)):
        compiled = [re.compile(pattern) for pattern in patterns]
        return {name: next((n for n, one in enumerate(compiled) if one.match(name)), None) for name in names}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([list(patterns), list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise TesseraError(
            f"regular expressions that take longer than {seconds:g} s to match",
            where=where,
            fix="write them without repetitions inside of repetitions, or name the modules one by one",
            code="recipe.expression-too-slow",
        ) from None
    except (subprocess.CalledProcessError, OSError) as error:
        raise TesseraError(
            f"the regular expressions could not be matched: {error}", where=where, code="recipe.expression-too-slow"
        ) from None
    numbers: dict[str, int | None] = json.loads(done.stdout)
    return numbers
