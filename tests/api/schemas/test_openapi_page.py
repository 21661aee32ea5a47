"""docs/api.md is what the server says of itself, docs/clients.md names the versions that are tested; links lead on."""

import json
import re
from pathlib import Path

from api.errors import ANSWERS
from tests.helpers.api_reference import PAGE, ROOT, description, page


def test_it_is_fresh() -> None:
    assert PAGE.read_text("utf-8") == page(), "stale: python -m tests.helpers.api_reference > docs/api.md"


def test_it_has_every_route_field_and_code() -> None:
    text = PAGE.read_text("utf-8")
    for path, methods in description()["paths"].items():
        assert all(f"`{method.upper()} {path}" in text for method in methods), path
    for name, shape in description()["components"]["schemas"].items():
        if name not in ("Error", "TgiError"):
            assert [field for field in shape.get("properties", ()) if f"| `{field}` |" not in text] == [], name
    assert [answer.code for answer in ANSWERS.values() if f"`{answer.code}`" not in text] == []


def test_links_lead_somewhere() -> None:
    folder = Path(PAGE).parent
    for name in ("api.md", "clients.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (folder / name).read_text("utf-8"))
        assert [link for link in links if not (folder / link).exists()] == [], name


def test_versions_of_clients_are_those_that_are_installed() -> None:
    pins = {}
    for file in (ROOT / "tests" / "clients" / "requirements").glob("*.txt"):
        pins |= dict(line.split("==") for line in file.read_text("utf-8").split() if "==" in line)
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    table = text[text.index("<!-- versions") : text.index("<!-- end of versions")]
    assert dict(re.findall(r"^\| ([a-z_-]+) \| ([0-9.]+) \|$", table, re.M)) == pins


def test_versions_of_replayed_clients_are_those_of_their_bodies() -> None:
    files = (ROOT / "tests" / "api" / "data" / "clients").glob("*.json")
    recorded = [json.loads(file.read_text("utf-8")) for file in files]
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    table = text[text.index("**Replayed**") : text.index("Where a client asks")]
    rows = dict(re.findall(r"^\| (\S[^|]*) \| (.*?) \| [^|]+ \|$", table, re.M)[1:])
    assert rows == {one["client"]: one["version"] for one in recorded}


README_NAMES = {"openai": "openai-python", "litellm": "LiteLLM", "langchain-openai": "LangChain"}


def test_the_readme_names_the_versions_of_the_page() -> None:
    """Of clients that run two numbers, of replayed ones the first number or commit that stands for their bodies."""
    page_text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    ran = re.findall(r"^\| ([a-z_-]+) \| (\d+\.\d+)[0-9.]* \|$", page_text, re.M)
    table = page_text[page_text.index("**Replayed**") : page_text.index("Where a client asks")]
    replayed = [
        (name, re.search(r"\b(\d[\w.]*|[0-9a-f]{7})\b", version))
        for name, version in re.findall(r"^\| (\S[^|]*) \| (.*?) \| [^|]+ \|$", table, re.M)[1:]
    ]
    told = [f"{README_NAMES.get(name, name)} {version}" for name, version in ran]
    told += [f"{name} {found[0]}" for name, found in replayed if found is not None]
    assert len(told) == 12
    assert [one for one in told if one not in readme] == []
