"""Every error has a stable code, and one page lists all codes."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest

from tessera.errors import TesseraError, with_fix
from tests.error_codes import CODE, PAGE, all_raised, code_texts, page, parsed, raised
from tests.error_cures import CAUSES, CURES
from tests.errors import raises
from tests.syntax import all_nodes


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Forget the trees of all sources at the end, and let the garbage collector look at none of their nodes."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def test_every_error_has_a_code_of_a_listed_subject() -> None:
    errors = all_raised()
    assert len(errors) > 1000
    assert [error.where for error in errors if error.code is None] == []
    wrong = {error.where: error.code for error in errors if error.code and not CODE.fullmatch(error.code)}
    assert wrong == {}, f"a code is subject.two-to-six-words; subjects are in {PAGE.name}"


def test_the_page_lists_every_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.error_codes"


def test_the_page_lists_every_text_of_the_source_that_is_a_code() -> None:
    listed = {error.code for error in all_raised()}
    written = {code for nodes in parsed().values() for code in code_texts(nodes)}
    assert sorted(written - listed) == [], "write the code as code= of the call that makes the error"


def test_every_code_has_a_cure() -> None:
    cures = {row.split(" | ")[0]: row.rstrip(" |").count(" | ") for row in page().splitlines() if row.startswith("| `")}
    assert [code for code, columns in cures.items() if columns < 2] == [], (
        "add a fix= or a line of tests/error_cures.py"
    )
    codes = {error.code for error in all_raised()}
    assert sorted((CURES.keys() | CAUSES.keys()) - codes) == [], "these codes are gone"


def has_words(cause: str) -> bool:
    """Return whether a cause has words besides the placeholders of values."""
    return re.search(r"[A-Za-z]{2}", re.sub(r"&lt;[^>]*>|<br>", "", cause)) is not None


def test_every_code_has_a_cause_in_words() -> None:
    rows = [row.split(" | ") for row in page().splitlines() if row.startswith("| `")]
    assert [code for code, cause, *_ in rows if not has_words(cause)] == [], "add a line to CAUSES"
    assert not has_words("&lt;item>: … &lt;why><br>")
    assert has_words("no file &lt;name>")


def test_a_planted_error_without_a_code_is_found() -> None:
    nodes = all_nodes("def f(x):\n    raise TesseraError(f'no {x}', fix='name it')\n")
    (error,) = raised(nodes, "f.py", {"TesseraError"}, set())
    assert (error.where, error.code, error.cause, error.cure) == ("f.py:2", None, "no <x>", "name it")


def test_codes_that_are_computed_or_passed_on_are_found() -> None:
    nodes = all_nodes(
        "def f(x, *, code):\n    raise TesseraError('no', code=code)\n"
        "f(1, code='run.one-way' if x else 'run.two')\n"
        "code = 'run.three-ways'\nraise TesseraError('no', code=code)\nf(1, 'run.four-ways')\n"
    )
    codes = {(error.where, error.code) for error in raised(nodes, "f.py", {"TesseraError"}, set())}
    assert codes == {("f.py:2", ""), ("f.py:3", "run.one-way"), ("f.py:3", "run.two"), ("f.py:5", None)}
    assert code_texts(nodes) == {"run.one-way", "run.three-ways", "run.four-ways"}


def test_the_code_is_the_last_line_and_survives_a_process_border() -> None:
    error = TesseraError("no column a", fix="name another", code="data.unknown-column")
    assert str(error).splitlines()[-1].split() == ["code:", "data.unknown-column"]
    rebuild, values = error.__reduce__()  # as pickle does
    copy = rebuild(*values)
    assert (copy.code, str(copy)) == (error.code, str(error))


def test_a_fix_is_added_only_where_it_is_missing() -> None:
    with raises("media.cannot-open", "photo.jpg", "use another file"), with_fix("photo.jpg", "use another file"):
        raise TesseraError("cannot be opened", code="media.cannot-open")
    with raises("media.cannot-open", "here", "so") as info, with_fix("photo.jpg", "use another file"):
        raise TesseraError("cannot be opened", where="here", fix="so", code="media.cannot-open")
    assert "photo.jpg" not in str(info.value)
