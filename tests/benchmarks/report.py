"""Write results of `lorasrv bench --json` or `bench_peers.py` as a table into docs/benchmarks/.

    lorasrv bench --adapters 0,16 --concurrency 1,16 --measure-machine --json > mine.jsonl
    python tests/benchmarks/report.py serving mine.jsonl
    python tests/benchmarks/report.py peers build/bench/peers.jsonl --title "Beside peers"

A section between `<!-- bench:NAME -->` and `<!-- /bench -->` has a table, the machine, versions, commit and the
commands. The section of that name is replaced on the page that has it; a new one is put at the end of peers.md, or of
--document, with a heading. --dry-run prints it.
"""

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from api.cli.bench.stats import FORMAT, Result

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
# An absolute path that is no part of a URL.
PATH = re.compile(r"(?<![\w:/.])~?/(?:[^\s/'=]+/)*([^\s/'=]+)")
MISSING = "–"


class InvalidResults(Exception):
    """Report a file that does not contain lines of `lorasrv bench --json`."""


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Read all lines of all files, in order.

    Raises:
        InvalidResults: a line is not a result; names file, line and problem.
        OSError: a file cannot be read.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.strip():
                found.append(_parse(line, f"{path.name}:{number}"))
    return found


def _parse(line: str, where: str) -> Result:
    try:
        value = json.loads(line)
    except ValueError:
        raise InvalidResults(f"{where}: not a line of JSON") from None
    if not isinstance(value, dict) or value.get("bench") != FORMAT:
        raise InvalidResults(f"{where}: not a result of `lorasrv bench --json` (bench: {FORMAT})")
    missing = {"settings", "server", "machine", "figures"} - value.keys()
    if missing:
        raise InvalidResults(f"{where}: {', '.join(sorted(missing))} is missing")
    return value


class NoSection(Exception):
    """The marks of a document do not pair, or a name is not valid in one."""


def section(name: str, results: Sequence[Result]) -> str:
    """Return the marked section as Markdown."""
    lines = [f"<!-- bench:{name} -->", *_table(results), "", *_facts(results), "<!-- /bench -->"]
    return "\n".join(lines)


def page_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the page of a folder that has the section; peers.md if none has.

    Raises:
        NoSection: several pages have it.
    """
    pages = [page for page in sorted(folder.glob("*.md")) if f"<!-- bench:{name} -->" in page.read_text("utf-8")]
    if len(pages) > 1:
        raise NoSection(f"bench:{name} is on {' and '.join(page.name for page in pages)}; name one with --document")
    return pages[0] if pages else folder / "peers.md"


def replace_section(text: str, name: str, new: str, title: str | None = None) -> str:
    """Return the document with that section.

    Raises:
        NoSection: its marks do not pair, or it has the name twice.
    """
    if not NAME.fullmatch(name):
        raise NoSection(f"{name!r} is not a name of a section; use small letters, digits and dashes")
    opened = [match.start() for match in re.finditer(re.escape(f"<!-- bench:{name} -->"), text)]
    if len(opened) > 1:
        raise NoSection(f"the document has bench:{name} {len(opened)} times")
    if not opened:
        return f"{text.rstrip()}\n\n## {title or name.capitalize()}\n\n{new}\n"
    end = text.find("<!-- /bench -->", opened[0])
    following = text.find("<!-- bench:", opened[0] + 1)
    if end < 0 or 0 <= following < end:
        raise NoSection(f"bench:{name} has no <!-- /bench --> behind it")
    return text[: opened[0]] + new + text[end + len("<!-- /bench -->") :]


def record(page: Path, name: str, lines: str) -> None:
    """Replace a section of a page with these lines."""
    new = f"<!-- bench:{name} -->\n{lines}\n<!-- /bench -->"
    page.write_text(replace_section(page.read_text("utf-8"), name, new), "utf-8")


def _table(results: Sequence[Result]) -> list[str]:
    columns = [(title, [show(result) for result in results]) for title, show in _COLUMNS]
    kept = [(title, cells) for title, cells in columns if any(cell != MISSING for cell in cells)]
    rows = zip(*(cells for _, cells in kept), strict=True)
    return [
        _line(title for title, _ in kept),
        "|" + "---|" * len(kept),
        *(_line(row) for row in rows),
    ]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _facts(results: Sequence[Result]) -> list[str]:
    """Return each fact once, however many results share it."""
    machines = _distinct(_machine(result["machine"]) for result in results)
    servers = _distinct(_server(result["server"]) for result in results)
    clients = _distinct(", ".join(f"{k} {v}" for k, v in result.get("client", {}).items()) for result in results)
    commits = _distinct(str(result.get("commit") or "unknown") for result in results)
    days = _distinct(str(result.get("time", ""))[:10] for result in results)
    seeds = _distinct(str(result["settings"].get("seed", MISSING)) for result in results)
    commands = _distinct(shlex.join(_without_folders(result["command"])) for result in results if result.get("command"))
    lines = [
        f"Machine: {'; '.join(machines)}.",
        f"Servers: {'; '.join(servers)}. Load: {'; '.join(clients)}.",
        f"Commit {', '.join(commits)}, {', '.join(days)}, seed {', '.join(seeds)}.",
    ]
    errors = _distinct(result["figures"]["first_error"] for result in results if result["figures"].get("first_error"))
    lines += [f"First errors: {'; '.join(errors)}."] if errors else []
    return [*lines, "", *(f"    {command}" for command in commands)]


def _machine(machine: dict[str, Any]) -> str:
    parts = [str(machine.get("cpu")), f"{machine.get('cores')} cores", " ".join(machine.get("instructions") or [])]
    if measured := machine.get("measured"):
        parts.append(f"reads {measured['read_bytes_per_s'] / 1e9:.1f} GB/s")
        parts.append(f"fp32 {measured['fp32_ops_per_s'] / 1e9:.0f} Gop/s")
        parts.append(f"int8 {measured['int8_ops_per_s'] / 1e9:.0f} Gop/s")
    return ", ".join(part for part in parts if part)


def _server(server: dict[str, Any]) -> str:
    told = [f"{server['name']} {server.get('version') or ''}".strip(), str(server.get("base", ""))]
    told += [str(server[name]) for name in ("quantization", "model_dtype", "dtype") if server.get(name)]
    return " ".join(part for part in told if part)


def _without_folders(command: Sequence[str]) -> list[str]:
    """Reduce absolute paths to their last part."""
    return [PATH.sub(r"\1", word) for word in command]


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))


def _load(result: Result) -> str:
    settings = result["settings"]
    if settings.get("concurrency"):
        return f"{settings['concurrency']} at a time"
    return f"{settings['rate']:g}/s" if settings.get("rate") else "trace"


def _spread(name: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        values = result["figures"][name]
        if values["p50"] is None:
            return MISSING
        return " / ".join(f"{values[q]:.0f}" if values[q] >= 100 else f"{values[q]:.1f}" for q in ("p50", "p90", "p99"))

    return show


def _figure(name: str, form: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        value = result["figures"].get(name)
        return MISSING if value is None else form.format(value)

    return show


def _of_floor(result: Result) -> str:
    return f"{100 * result['floor']['of_floor']:.0f} %" if "floor" in result else MISSING


_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("server", lambda result: result.get("label") or MISSING),
    ("load", _load),
    ("adapters", lambda result: str(result["figures"]["adapters"] or "base")),
    ("adapter popularity", lambda result: result["settings"].get("law") or MISSING),
    (
        "prompt + answer",
        lambda r: f"{r['figures']['prompt_tokens_mean']:.0f} + {r['figures']['output_tokens_mean']:.0f}",
    ),
    ("tok/s", _figure("output_tok_per_s", "{:.1f}")),
    ("tok/s with prompts", _figure("total_tok_per_s", "{:.1f}")),
    ("TTFT p50 / p90 / p99 ms", _spread("ttft_ms")),
    ("TPOT ms", _spread("tpot_ms")),
    ("ITL ms", _spread("itl_ms")),
    ("goodput/s", _figure("goodput_per_s", "{:.2f}")),
    ("MBU", _figure("mbu", "{:.0%}")),
    ("MFU", _figure("mfu", "{:.0%}")),
    ("of floor", _of_floor),
    ("failed", lambda result: f"{result['figures']['failed']} of {result['figures']['requests']}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the section")
    parser.add_argument("files", nargs="+", type=Path, help="of JSON lines")
    parser.add_argument("--document", type=Path, help="the page; otherwise the one that has the section")
    parser.add_argument("--title", help="of a section that is new")
    parser.add_argument("--dry-run", action="store_true", help="print it, write nothing")
    a = parser.parse_args()
    try:
        results = read_results(a.files)
        if not results:
            raise InvalidResults(f"{a.files[0].name}: no results")
        new = section(a.name, results)
        document = a.document or page_of(a.name)
        text = replace_section(document.read_text("utf-8"), a.name, new, a.title)
    except (InvalidResults, NoSection) as error:
        raise SystemExit(f"report.py: {error}") from None
    except OSError as error:
        raise SystemExit(f"report.py: {error.filename}: {error.strerror}") from None
    if a.dry_run:
        print(new)
    else:
        document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
