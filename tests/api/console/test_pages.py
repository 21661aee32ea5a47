"""The console's files: which are served, how, and what must not stand in them. tests/browser runs them."""

import re
from pathlib import Path

import httpx2

from api.console.pages import HEADERS, read_pages
from api.console.paths import CONSOLE_PATHS, STATIC_FILES

STATIC = Path(__file__).parents[3] / "api" / "console" / "static"
MAX_LINES = 400
TEXTS = {path.name: path.read_text("utf-8") for path in sorted(STATIC.iterdir())}
MODULES = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
STYLES = {name: text for name, text in TEXTS.items() if name.endswith(".css")}
HTML = TEXTS["index.html"]
# What would make markup or code of a text, or ask for it.
UNSAFE = (
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|new Function|srcdoc|setTimeout\(\s*[\"'`]"
)


class TestRoutes:
    def test_every_file(self, server) -> None:
        kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        for path in CONSOLE_PATHS:
            response, head = server.http.get(path), server.http.head(path)
            assert response.status_code == 200, path
            assert response.headers["content-type"].startswith(kinds.get(path.rpartition(".")[2], "text/html"))
            assert HEADERS.items() <= dict(response.headers).items()
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(response.content))
            assert head.headers["etag"] == response.headers["etag"]

    def test_headers(self, server) -> None:
        headers = dict(server.http.get("/console").headers)
        wanted = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        assert wanted.items() <= headers.items()
        policy = set(headers["content-security-policy"].split("; "))
        assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "trusted-types 'none'"} <= policy
        assert not re.search(r"unsafe|\*|https?:|data:", "; ".join(policy))
        assert "content-security-policy" not in server.http.get("/health").headers
        assert not [path for path in server.http.get("/openapi.json").json()["paths"] if "console" in path]

    def test_what_is_known_is_not_sent_again(self, server) -> None:
        first = server.http.get("/console/app.js")
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = server.http.get("/console/app.js", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        for other in ('"other"', tag.strip('"'), ""):
            assert server.http.get("/console/app.js", headers={"if-none-match": other}).status_code == 200
        assert server.http.get("/console").headers["etag"] != tag

    def test_nothing_else(self, server) -> None:
        wrong = ("index.html", "app.js/", "pages.py", "../pages.py", "%2e%2e/pages.py", "..%2fpages.py", "/app.js")
        for path in [*(f"/console/{name}" for name in wrong), "/consolex"]:
            url = httpx2.URL(server.url).copy_with(raw_path=path.encode())
            assert server.http.get(url).status_code == 404, path
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert server.http.request(method, "/console").status_code == 405
            assert server.http.request(method, "/console/app.js").status_code == 405


class TestFiles:
    def test_the_table_is_exact(self) -> None:
        assert sorted([*STATIC_FILES, "index.html"]) == list(TEXTS)
        assert set(read_pages()) == set(CONSOLE_PATHS)
        assert len(set(CONSOLE_PATHS)) == len(CONSOLE_PATHS)
        # setuptools takes what the pattern names; tests/test_packaging.py looks into a wheel.
        assert '"api.console" = ["static/*"]' in (STATIC.parents[2] / "pyproject.toml").read_text("utf-8")

    def test_each_is_one_concept_long_and_begins_with_what_it_is(self) -> None:
        assert {name: text.count("\n") for name, text in TEXTS.items() if text.count("\n") > MAX_LINES} == {}
        assert [name for name, text in MODULES.items() if not text.startswith("// ")] == []
        assert [name for name, text in STYLES.items() if not text.startswith("/* ")] == []

    def test_nothing_comes_from_elsewhere(self) -> None:
        """No URL of another host, in no spelling."""
        url = re.compile(r"(?:\w+:)?//[\w.\[]+\.[\w.]+")
        found = {name: url.findall(text.replace("http://www.w3.org/2000/svg", "")) for name, text in TEXTS.items()}
        assert {name: urls for name, urls in found.items() if urls} == {}
        assert not any(re.search(r"@import|url\(", text) for text in STYLES.values())

    def test_no_text_becomes_markup_or_code(self) -> None:
        assert {name: re.findall(UNSAFE, text) for name, text in MODULES.items() if re.search(UNSAFE, text)} == {}
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", HTML, re.I)
        scripts = re.findall(r"<script([^>]*)>(.*?)</script>", HTML, re.S)
        assert scripts
        assert all("src=" in attributes and not body for attributes, body in scripts)

    def test_the_page_finds_its_files_with_and_without_a_slash(self, server) -> None:
        for path in ("/console", "/console/"):
            loaded = re.findall(r'(?:src|href)="([^"#]+\.(?:js|css|svg))"', server.http.get(path).text)
            assert len(loaded) >= 6
            urls = [httpx2.URL(f"http://x{path}").join(link).path for link in loaded]
            assert [url for url in urls if url not in CONSOLE_PATHS] == []

    def test_every_module_is_there_and_used(self) -> None:
        imported = {found for text in MODULES.values() for found in re.findall(r'from "\./([\w.]+)"', text)}
        assert imported <= set(MODULES)
        assert set(MODULES) - imported == {"app.js", "theme.js"}

    def test_every_element_that_is_referred_to_is_on_the_page(self) -> None:
        ids = re.findall(r'\sid="([^"]+)"', HTML)
        assert len(ids) == len(set(ids))
        asked = {found for text in MODULES.values() for found in re.findall(r'byId\("([^"]+)"\)', text)}
        pointed = " ".join(re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', HTML)).split()
        anchors = re.findall(r'href="#([^"]+)"', HTML)
        assert {*asked, *pointed, *anchors} - set(ids) == set()

    def test_the_figures_it_reads_are_figures_that_there_are(self, server) -> None:
        named = {found for text in MODULES.values() for found in re.findall(r'"(lorasrv_\w+)"', text)}
        shown = server.http.get("/metrics").text
        assert named
        assert [name for name in named if not re.search(rf"^{name}(_bucket)?[{{ ]", shown, re.M)] == []
