"""Pages in English and in Chinese say the same: the same headings, tables, links and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Tables of names and numbers, most of them generated, and the diary: one page serves both languages.
SHARED = {
    "log.md",
    "reference/acceptance.md",
    "reference/compat-flags.md",
    "reference/compat-fsdp2.md",
    "reference/compat-megatron.md",
    "reference/compat-pretrain.md",
    "reference/error-codes.md",
    "reference/presets.md",
}
# Pages whose Chinese side is still to be written. A new page does not belong here: it comes with both.
WAITING: set[str] = set()


BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def english_pages() -> list[str]:
    return sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if not page.name.endswith(".zh.md"))


def twin(page: str) -> Path:
    return DOCS / page.replace(".md", ".zh.md")


TWINS = [
    page for page in english_pages() if twin(page).exists() and page != "README.md"
]  # the index has a test of its own


def code(text: str) -> list[tuple[str, str]]:
    """Return the blocks of a page with their languages, without comments: those are translated."""
    blocks = []
    for _, language, block in BLOCK.findall(text):
        lines = [re.sub(r"(?:^|\s+)#(?: .*)?$", "", line).rstrip() for line in block.splitlines()]
        blocks.append((language, "\n".join(line for line in lines if line)))
    return blocks


def headings(text: str) -> list[int]:
    """Return the levels of the headings of a page."""
    return [len(marks) for marks in re.findall(r"^(#+) ", BLOCK.sub("", text), re.MULTILINE)]


def tables(text: str) -> list[tuple[int, int]]:
    """Return the rows and columns of the tables of a page."""
    sizes: list[tuple[int, int]] = []
    for table in re.findall(r"(?:^\|.*\n)+", BLOCK.sub("", text) + "\n", re.MULTILINE):
        rows = table.splitlines()
        sizes.append((len(rows), len(re.findall(r"(?<!\\)\|", rows[0]))))
    return sizes


def differences(english: str, chinese: str) -> list[str]:
    """Return what one side of a page has and the other has not."""
    wrong: list[str] = []
    if headings(english) != headings(chinese):
        wrong.append(f"headings: {headings(english)} and {headings(chinese)}")
    if tables(english) != tables(chinese):
        wrong.append(f"tables (rows, columns): {tables(english)} and {tables(chinese)}")
    ours, theirs = code(english), code(chinese)
    if len(ours) != len(theirs):
        wrong.append(f"{len(ours)} and {len(theirs)} blocks of code")
    wrong += [f"code differs:\n{a[1]}\n---\n{b[1]}" for a, b in zip(ours, theirs, strict=False) if a != b]
    return wrong


@pytest.mark.parametrize("page", TWINS)
def test_both_sides_of_a_page_are_in_step(page: str) -> None:
    english, chinese = (DOCS / page).read_text(encoding="utf-8"), twin(page).read_text(encoding="utf-8")
    assert differences(english, chinese) == []
    words = BLOCK.sub("", chinese)
    assert len(re.findall(r"[\u4e00-\u9fff]", words)) > len(words) / 20, "it is not in Chinese"


def test_every_page_has_both_sides_or_says_why_not() -> None:
    assert (DOCS / "README.zh.md").exists()
    alone = {page for page in english_pages() if not twin(page).exists()}
    assert alone - SHARED - WAITING == set(), "write the Chinese side as well: NAME.zh.md"
    assert alone >= WAITING, "its Chinese side is written: take it off the list"
    assert alone >= SHARED
    orphans = [page for page in DOCS.rglob("*.zh.md") if not Path(str(page).replace(".zh.md", ".md")).exists()]
    assert orphans == []


def test_pages_in_chinese_lead_to_pages_in_chinese() -> None:
    for page in [*ROOT.glob("*.zh.md"), *DOCS.rglob("*.zh.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            other = page.parent / target.replace(".md", ".zh.md")
            switch = target == page.name.replace(".zh.md", ".md")  # to the same page in English
            assert target.endswith(".zh.md") or not other.exists() or switch, (
                f"{page.relative_to(ROOT)} links to {target}, and there is {other.name}"
            )


def anchors(page: Path) -> set[str]:
    """Return the names by which the headings of a page can be linked to."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def test_links_to_a_heading_find_it() -> None:
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", text):
            other = page.parent / target if target else page
            if other.suffix == ".md":
                assert anchor in anchors(other), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


def test_an_index_names_every_page() -> None:
    english, chinese = ((DOCS / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for page in english_pages():
        if not page.startswith(("README", "reference/compat-")):  # those are named by the pages that they belong to
            assert f"({page}" in english, f"docs/README.md does not name {page}"
    for page in TWINS:
        name = page.replace(".md", ".zh.md")
        assert f"({name}" in chinese or f"({name}" in english, f"docs/README.zh.md does not name {name}"


def test_a_planted_difference_is_found() -> None:
    page = "# A\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```bash\ntessera train a.yaml   # go\n```\n"
    chinese = page.replace("# A", "# 甲").replace("# go", "# 开始")
    assert differences(page, chinese) == []
    for change in (
        ("# 甲", "## 甲"),
        ("| 1 | 2 |\n", ""),
        ("a.yaml", "b.yaml"),
        ("```bash", "```sh"),
        ("| a | b |\n|---|---|", "| a |\n|---|"),
    ):
        assert change[0] in chinese
        assert differences(page, chinese.replace(*change)), change
