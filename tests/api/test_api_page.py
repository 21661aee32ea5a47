"""docs/api.md is what the server says of itself, docs/clients.md names the versions that are tested; links lead on."""

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
