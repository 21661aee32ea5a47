"""The console's files: which are served, how, and what must not stand in them. tests/browser runs them."""

import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adapter_store.spec import AdapterKey
from api.cli.top.stats import quantile
from api.console.pages import HEADERS, read_pages
from api.console.paths import CONSOLE_PATHS, STATIC_FILES
from api.schemas.openapi_examples import EXAMPLES
from lorasrv.engine.pool_snapshot import AdapterPages, PoolMap, RequestPages
from lorasrv.outputs import RequestId

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
NODE = shutil.which("node")


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


class TestModules:
    """The parts that need no page, in node, against what Python computes."""

    @pytest.mark.skipif(NODE is None, reason="node is not installed")
    def test_they_parse(self, tmp_path: Path) -> None:
        copies = [tmp_path / name.replace(".js", ".mjs") for name in MODULES]
        for copy, text in zip(copies, MODULES.values(), strict=True):
            copy.write_text(text)
        # All in one process: starting one takes longer than parsing.
        code = (
            "import fs from 'node:fs'; import vm from 'node:vm';"
            "for (const name of process.argv.slice(1))"
            " new vm.SourceTextModule(fs.readFileSync(name, 'utf-8'), { identifier: name });"
        )
        node(["--experimental-vm-modules", "--input-type=module", "--eval", code, *map(str, copies)])

    def test_sha256(self, modules) -> None:
        sizes = [0, 1, 55, 56, 63, 64, 65, 119, 128, 1000, 100_003]
        code = """
        import { Sha256 } from "./hash.mjs";
        const out = given.map(([size, step]) => {
          const bytes = Uint8Array.from({ length: size }, (_, i) => (i * 31 + 7) & 255);
          const sha = new Sha256();
          for (let at = 0; at < size; at += step) sha.add(bytes.subarray(at, at + step));
          return [...sha.end()].map((b) => b.toString(16).padStart(2, "0")).join("");
        });
        console.log(JSON.stringify(out));
        """
        given = [[size, step] for size in sizes for step in (1, 37, 64, 1 << 20)]
        wanted = [hashlib.sha256(bytes((i * 31 + 7) & 255 for i in range(size))).hexdigest() for size, _ in given]
        assert modules(code, given) == wanted

    def test_quantiles_are_those_of_top(self, modules) -> None:
        dice = random.Random(0)
        cases = []
        for _ in range(50):
            counts, total = [], 0
            for bound in [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, float("inf")]:
                total += dice.choice([0, 0, 1, 3, 9])
                counts.append([bound, total])
            cases.append((counts, dice.choice([0.5, 0.95, 0.01, 1.0])))
        code = """
        import { quantile } from "./metrics.mjs";
        const bound = (b) => b === null ? Infinity : b;
        const counted = (counts) => new Map(counts.map(([b, n]) => [bound(b), n]));
        console.log(JSON.stringify(given.map(([counts, share]) => quantile(counted(counts), share))));
        """
        sent = [[[[None if b == float("inf") else b, n] for b, n in counts], share] for counts, share in cases]
        wanted = [quantile(dict(counts), share) if counts[-1][1] else None for counts, share in cases]
        assert modules(code, sent) == [None if one is None else pytest.approx(one) for one in wanted]

    def test_history_of_a_server_that_goes_away_and_comes_back(self, modules, server) -> None:
        text = server.http.get("/metrics").text
        code = """
        import { History, parse } from "./metrics.mjs";
        const at = (steps, tokens, first) => parse(given
          .replace(/^lorasrv_steps_total .*/m, `lorasrv_steps_total ${steps}`)
          .replace(/^lorasrv_generated_tokens_total .*/m, `lorasrv_generated_tokens_total ${tokens}`)
          .replace(/^(lorasrv_time_to_first_token_seconds_bucket.*) .*/gm, `$1 ${first}`));
        const h = new History();
        const points = [h.add(0, at(1, 100, 0)), h.add(2000, at(5, 140, 3)), h.add(4000, at(6, 140, 3))];
        h.addGap(6000); h.addGap(8000);
        points.push(h.add(10000, at(7, 500, 3)));
        points.push(h.add(12000, at(2, 10, 0)));
        points.push(h.add(14000, at(9, 20, 0)));
        console.log(JSON.stringify({ tokens: points.map((p) => p.tokens), first: points.map((p) => p.first50 !== null),
          gaps: h.points.map((p) => Boolean(p.gap)), parsed: parse(given).totals.get("lorasrv_pages_total"),
          later: [h.addGap(999999), h.points.length][1] }));
        """
        done = modules(code, text)
        assert done["tokens"] == [None, 20, 0, None, None, 5]
        assert done["first"] == [False, True, True, False, False, False]
        # One gap while it was away, one where it was restarted between two scrapes.
        assert done["gaps"] == [False, False, False, True, False, True, False, False]
        assert done["parsed"] == 10
        assert done["later"] == 1

    def test_the_map_names_every_page_as_the_pool_does(self, modules, server, engine, make_adapter) -> None:
        key = AdapterKey(server.upload(make_adapter(), "mia").json()["digest"].removeprefix("sha256:"))
        requests = (
            RequestPages(RequestId("a#1"), key, 3, 2, (0, 1, 2)),
            RequestPages(RequestId("b#2"), None, 3, 2, (0, 1, 9)),
        )
        adapters = (
            AdapterPages(key, "ready", 6, ((60, 4), (50, 2)), 1, 6, 2, True),
            AdapterPages(AdapterKey("0" * 64), "copying", 2, ((48, 2),), 1, 2, 0, False),
        )
        engine.pool = PoolMap(64, 49, 4, 3, 8, 16, 1024, 2, 40, 3, requests, adapters, 0, (), (3, 4, 5))
        code = """
        import { kindAt, layOut, ownerSentence, sentence } from "./pool_owners.mjs";
        const map = layOut(given);
        const kinds = Array.from(map.pages, (_, page) => kindAt(map, page));
        console.log(JSON.stringify({ kinds, said: [0, 3, 9, 48, 60, 63, 47].map((page) => sentence(map, page)),
          owners: map.owners.map(ownerSentence), counts: map.counts }));
        """
        done = modules(code, server.http.get("/v1/pool").json())
        wanted = ["kv"] * 3 + ["prefix"] * 3 + ["free"] * 3 + ["kv"] + ["free"] * 38 + ["adapter"] * 4
        assert done["kinds"] == [*wanted, *["free"] * 8, *["adapter"] * 4]
        assert {kind: done["kinds"].count(kind) for kind in done["counts"]} == done["counts"]
        assert done["owners"] == [
            "Adapter mia (6 pages, ready, pinned, 2 running on it, in 2 pieces)",
            "Adapter an adapter without a name (000000000000) (2 pages, being copied)",
            "Keys and values of request a#1 (3 pages, on mia, 2 shared)",
            "Keys and values of request b#2 (3 pages, the base, 2 shared)",
            "Kept prompts of earlier requests (3 pages)",
        ]
        assert done["said"] == [
            "Page 0: keys and values of request a#1 (3 pages, on mia, 2 shared); 2 requests share this page",
            "Page 3: kept prompts of earlier requests (3 pages)",
            "Page 9: keys and values of request b#2 (3 pages, the base, 2 shared)",
            "Page 48: adapter an adapter without a name (000000000000) (2 pages, being copied)",
            "Page 60: adapter mia (6 pages, ready, pinned, 2 running on it, in 2 pieces)",
            "Page 63: adapter mia (6 pages, ready, pinned, 2 running on it, in 2 pieces)",
            "Page 47: free",
        ]

    def test_a_grid_shows_legible_squares_and_a_window_reaches_every_page(self, modules) -> None:
        code = """
        import { gridFor, squareUnder, windowAt } from "./pool_pages.mjs";
        console.log(JSON.stringify(given.map(([total, width, height]) => {
          const g = gridFor(total, width, height);
          const firsts = [0, total >> 2, total >> 1, total - 1].map((page) => [page, windowAt(g, total, 0, page)]);
          return { ...g, corner: squareUnder(g, g.size * 0.5, g.size * 0.5), fits: g.rows * g.size <= height,
            wide: g.columns * g.size <= width, outside: squareUnder(g, g.columns * g.size + 1, 0),
            reached: firsts.every(([page, first]) => page >= first && page < first + g.squares),
            stays: windowAt(g, total, firsts[2][1], firsts[2][1]) === firsts[2][1] };
        })));
        """
        sizes = [
            (10, 600, 290),
            (1456, 600, 290),
            (14_457, 600, 290),
            (400_000, 330, 290),
            (1, 100, 100),
            (5000, 300, 290),
        ]
        for (total, *_), grid in zip(sizes, modules(code, sizes), strict=True):
            assert [grid[name] for name in ("fits", "wide", "reached", "stays")] == [True] * 4
            assert grid["size"] >= 7
            assert (grid["squares"] == total) == (total in (10, 1456, 1))
            assert grid["columns"] * grid["rows"] >= grid["squares"]
            assert (grid["corner"], grid["outside"]) == (0, -1)

    def test_areas_are_as_large_as_what_their_owners_have(self, modules) -> None:
        dice = random.Random(0)
        kinds = ("adapter", "kv", "prefix")
        cases = [
            [{"kind": dice.choice(kinds), "pages": dice.choice([1, 2, 26, 300])} for _ in range(number)]
            for number in (1, 2, 5, 40, 400)
        ]
        code = """
        import { areasOf } from "./pool_areas.mjs";
        console.log(JSON.stringify(given.map((owners) => areasOf({ owners }, 600, 292))));
        """
        assert modules(code, [[]]) == [[]], "an empty pool"
        for owners, areas in zip(cases, modules(code, cases), strict=True):
            assert sorted(area["place"] for area in areas) == list(range(len(owners)))
            assert sum(area["w"] * area["h"] for area in areas) == pytest.approx(600 * 292)
            for area in areas:
                assert -0.01 <= area["x"] <= area["x"] + area["w"] <= 600.01
                assert -0.01 <= area["y"] <= area["y"] + area["h"] <= 292.01
            for kind in kinds:
                of_kind = [area for area in areas if area["kind"] == kind]
                a_page = {round(area["w"] * area["h"] / owners[area["place"]]["pages"], 3) for area in of_kind}
                assert len(a_page) <= 1
                assert not of_kind or sum(area["w"] * area["h"] for area in of_kind) >= 0.1 * 600 * 292

    def test_a_time_axis_has_a_few_marks_whatever_its_length(self, modules) -> None:
        code = """
        import { ticks } from "./chart.mjs";
        console.log(JSON.stringify(given.map(ticks)));
        """
        spans = [10_000, 12_000, 25_000, 45_000, 100_000, 299_000, 300_000]
        for span, marks in zip(spans, modules(code, spans), strict=True):
            assert marks[0] == 0
            assert 2 <= len(marks) <= 5
            assert marks[-1] < span

    def test_the_ledger_in_words(self, modules, server, make_adapter) -> None:
        first = {"count": 3, "mean_ms": 21.0, "p50_ms": 20.0, "p95_ms": 41.5}
        code = """
        import { ledgerRows } from "./ledger.mjs";
        console.log(JSON.stringify(given.map(ledgerRows)));
        """
        example = EXAMPLES[("GET", "/v1/adapters/{adapter_id}/stats")].answer | {"ttft": {"hot": first, "cold": None}}
        server.upload(make_adapter(), "mia")
        used, unused = modules(code, [example, server.http.get("/v1/adapters/mia/stats").json()])
        assert unused == [["Requests", "none yet"]]
        assert [row for row in used if row[1] is not None] == [
            ["Requests", "10, 1 aborted"],
            ["First and last", "2026-11-22 05:05 UTC, 2026-11-22 06:05 UTC"],
            ["Prompts", "812 tokens, 640 from the prefix cache"],
            ["Answers", "590 tokens"],
            ["Compute", "4.0 s"],
            ["Adapter was", "9 in the pool, 1 on the disk"],
            ["Loads", "1 file read, 1.9 MiB"],
            ["Copies", "1 to the pool, 1.9 MiB"],
            ["Held of the pool", "320 KiB hours"],
            ["First token, adapter in the pool", "20 ms median, 42 ms for 95 % (3 answers)"],
        ]

    def test_files_of_a_drop(self, modules) -> None:
        code = """
        import { adapterFiles, idFrom } from "./files.mjs";
        const of = (names) => adapterFiles(names.map((name) => ({ name, folder: "My Bot!" })));
        console.log(JSON.stringify({ found: given.map((names) => of(names).problem ?? of(names).folder),
          ids: ["My Bot!", "..x", "a".repeat(99), "Ünï"].map(idFrom) }));
        """
        config, weights = "adapter_config.json", "adapter_model.safetensors"
        dropped = [[config, weights, "README.md"], [config], [], [config, "adapter_model.bin"], [config, weights] * 2]
        done = modules(code, dropped)
        whole, half, none, pickled, twice = done["found"]
        assert whole == "My Bot!"
        assert half == "adapter_model.safetensors is missing."
        assert none == "adapter_config.json and adapter_model.safetensors are missing."
        assert ("pickle" in pickled, "more than one" in twice) == (True, True)
        assert done["ids"] == ["my-bot-", "x", "a" * 64, "n-"]


def node(arguments: list[str], **how: Any) -> str:
    """Run node; its output."""
    command = [str(NODE), "--no-warnings", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory):
    """Runs code that imports copies of the console's modules, which older nodes want to be called .mjs."""
    if NODE is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        renamed = re.sub(r'from "\./(\w+)\.js"', r'from "./\1.mjs"', text)
        (folder / name.replace(".js", ".mjs")).write_text(renamed, "utf-8")

    def run(code: str, given: object) -> Mapping[str, Any]:
        script = 'import fs from "node:fs"; const given = JSON.parse(fs.readFileSync(0, "utf-8"));\n' + code
        (folder / "main.mjs").write_text(script, "utf-8")
        return json.loads(node([str(folder / "main.mjs")], input=json.dumps(given)))

    return run
