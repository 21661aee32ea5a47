"""The console's modules, as far as they need no page, in node, against what Python computes."""

import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapter_store.spec import AdapterKey
from api.cli.top.stats import quantile
from api.schemas.openapi_examples import EXAMPLES
from lorasrv.engine.pool_map import AdapterPages, PoolMap, RequestPages
from lorasrv.outputs import RequestId

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("the console's modules are not run without node: apt-get install nodejs", allow_module_level=True)
STATIC = Path(__file__).parents[3] / "api" / "console" / "static"
MODULES = {path.name: path.read_text("utf-8") for path in sorted(STATIC.glob("*.js"))}


def test_they_parse(tmp_path: Path) -> None:
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


def test_sha256(modules) -> None:
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


def test_quantiles_are_those_of_top(modules) -> None:
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


def test_history_of_a_server_that_goes_away_and_comes_back(modules, server) -> None:
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
    points.push(h.add(12000, at(8, 10, 0)));
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


def test_the_map_names_every_page_as_the_pool_does(modules, server, engine, make_adapter) -> None:
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


def test_a_grid_shows_legible_squares_and_a_window_reaches_every_page(modules) -> None:
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


def test_areas_are_as_large_as_what_their_owners_have(modules) -> None:
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


def test_a_time_axis_has_a_few_marks_whatever_its_length(modules) -> None:
    code = """
    import { ticks } from "./chart.mjs";
    console.log(JSON.stringify(given.map(ticks)));
    """
    spans = [10_000, 12_000, 25_000, 45_000, 100_000, 299_000, 300_000]
    for span, marks in zip(spans, modules(code, spans), strict=True):
        assert marks[0] == 0
        assert 2 <= len(marks) <= 5
        assert marks[-1] < span


def test_the_ledger_in_words(modules, server, make_adapter) -> None:
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
        ["Drafts", "170 of 310 tokens right, 1.4 tokens a step"],
        ["Compute", "4.0 s"],
        ["Adapter was", "9 in the pool, 1 on the disk"],
        ["Loads", "1 file read, 1.9 MiB"],
        ["Copies", "1 to the pool, 1.9 MiB"],
        ["Held of the pool", "320 KiB hours"],
        ["First token, adapter in the pool", "20 ms median, 42 ms for 95 % (3 answers)"],
    ]


def test_a_verdict_in_words(modules) -> None:
    code = """
    import { verdictRows } from "./verdict.mjs";
    console.log(JSON.stringify(given.map(verdictRows)));
    """
    example = EXAMPLES["POST", "/v1/adapters/{reference}:verify"].answer
    wrong = {"num_wrong": 9, "wrong": ["layers.0.q", "layers.1.q"]}
    within, differs = modules(code, [example, example | {"linears": example["linears"] | wrong}])
    assert [row for row in within if row[1] is not None] == [
        ["Logits with the adapter", "off by 0.21 rms, 1.31 at most"],
        ["Logits without it", "off by 0.23 rms, 1.31 at most"],
        ["Same likeliest token", "33 of 36 with the adapter, 35 of 36 without"],
        ["Effect of the adapter", "6.1 rms, 29.1 at most; 31 of 36 likeliest tokens changed"],
        ["Linears", "210 of 210 adapted"],
        ["Worst linear", "model.layers.3.self_attn.q_proj, off by 6e-7; up to 0.01 is rounding"],
        ["Computed with", "smollm2-135m, weights int4, adapter bfloat16, numba kernels"],
        ["Prompts", "4 prompts, 8 new tokens each"],
        ["Took", "35.2 s, 18.1 s of one processor, 1.2 GiB"],
    ]
    assert ["Wrong linears", "9: layers.0.q, layers.1.q"] in differs


def test_an_owner_of_many_ids_is_told_by_a_few(modules) -> None:
    """A thousand in one text took seconds to draw."""
    code = """
    import { layOut } from "./pool_owners.mjs";
    const of = (count) => ({ ids: Array.from({ length: count }, (_, n) => `m${n}`), digest: "sha256:ab", state: "ready",
      runs: [[0, 1]], pages: 1 });
    const pool = (count) => ({ pages_total: 4, adapters: [of(count)] });
    console.log(JSON.stringify(given.map((count) => layOut(pool(count)).owners[0].who)));
    """
    assert modules(code, [2, 5, 1000]) == ["m0, m1", "m0, m1, m2, m3, m4", "m0, m1, m2, m3, m4 and 995 more"]


def test_files_of_a_drop(modules) -> None:
    code = """
    import { adapterFiles, idFrom } from "./files.mjs";
    const of = (names) => adapterFiles(names.map((name) => ({ name, path: `My Bot!/${name}` })));
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
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        renamed = re.sub(r'from "\./(\w+)\.js"', r'from "./\1.mjs"', text)
        (folder / name.replace(".js", ".mjs")).write_text(renamed, "utf-8")

    def run(code: str, given: object) -> Mapping[str, Any]:
        script = 'import fs from "node:fs"; const given = JSON.parse(fs.readFileSync(0, "utf-8"));\n' + code
        (folder / "main.mjs").write_text(script, "utf-8")
        return json.loads(node([str(folder / "main.mjs")], input=json.dumps(given)))

    return run
