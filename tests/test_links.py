"""Links of the pages lead somewhere: every file that a page or a comment names is there, with its heading."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# A page that a docstring, a comment or a recipe names from the root.
NAMED = re.compile(r"\bdocs/[\w/.-]+\.md(?:#[\w-]+)?")
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
FOLDERS = ("adapter_store", "api", "docs", "examples", "lorasrv", "sgmv_kernels", "tests")
INDEX = ROOT / "docs" / "benchmarks.md"


def written(suffix: str) -> list[Path]:
    """Files of the root and of the folders that hold what is written here."""
    return [*ROOT.glob(f"*{suffix}"), *(path for name in FOLDERS for path in (ROOT / name).rglob(f"*{suffix}"))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Ids that the page gives itself, and what GitHub makes of its headings: a second one of a name ends in -1."""
    text = FENCED.sub("", page.read_text("utf-8"))
    found: list[str] = re.findall(r'<a id="([^"]+)">', text)
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return frozenset(
        name + (f"-{found[:at].count(name)}" if name in found[:at] else "") for at, name in enumerate(found)
    )


def leads_nowhere(link: str, page: Path) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return not target.exists() or (bool(anchor) and target.suffix == ".md" and anchor not in anchors(target))


def links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        if not re.match(r"[a-z]+:", link):
            yield link


def test_links_of_pages() -> None:
    pages = written(".md")
    assert len(pages) >= 40
    assert [(str(p.relative_to(ROOT)), link) for p in pages for link in links(p) if leads_nowhere(link, p)] == []
    assert leads_nowhere("benchmarks.md#no-such-heading", ROOT / "docs" / "limits.md")
    assert leads_nowhere("no-such-page.md", INDEX)


def test_pages_that_code_names() -> None:
    named = [
        (path, link) for path in [*written(".py"), ROOT / "Makefile"] for link in NAMED.findall(path.read_text("utf-8"))
    ]
    assert len(named) >= 20
    root = ROOT / "README.md"
    assert [(str(path.relative_to(ROOT)), link) for path, link in named if leads_nowhere(link, root)] == []


def test_pages_of_figures_and_their_index() -> None:
    pages = sorted(INDEX.with_suffix("").glob("*.md"))
    linked = {link.partition("#")[0] for link in links(INDEX)}
    assert [page.name for page in pages if f"benchmarks/{page.name}" not in linked] == []
    assert [page.name for page in pages if "../benchmarks.md" not in list(links(page))] == []
