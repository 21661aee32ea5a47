"""Demonstrate serving on this machine: a server, uploads, concurrent requests, answers side by side (demo)."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapter_store.formats.peft_dir import CONFIG_NAME, read_peft_dir
from api.cli.common.child_server import running_server
from api.cli.common.options import JsonOption, connected
from api.cli.common.terminal import CliError, ExitCode, note, out, print_json, progress, say, short_digest
from lorasrv.config import BUILTIN_MODEL

if TYPE_CHECKING:
    from api.client import Client

QUESTIONS = ("How do I keep my houseplants alive?", "What should I pack for a day at the beach?")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "persona_bots" / "adapters"
BASE = "base"


@dataclass(frozen=True, slots=True)
class PersonaReply:
    """Hold one answer; `adapter` and `digest` come from the response headers, None for the base."""

    asked: str
    question: str
    text: str
    adapter: str | None
    digest: str | None
    tokens: int
    tokens_per_s: float


def demo(
    personas: Annotated[Path, typer.Option(metavar="DIR", help="A folder of PEFT folders.")] = EXAMPLES,
    model: Annotated[str, typer.Option(help="Base to serve.")] = BUILTIN_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Start a server, upload the example personas, and ask them and the base the same questions concurrently."""
    folders = _persona_folders(personas)
    with tempfile.TemporaryDirectory(prefix="lorasrv-demo-") as store:
        with _running_server(model, Path(store)) as url, connected(url) as client:
            for folder in folders:
                _upload(client, folder)
            asked = {BASE: client.base_name(), **{folder.name: folder.name for folder in folders}}
            note(f"asking {', '.join(asked)} {len(QUESTIONS)} questions at once ...")
            started = time.monotonic()
            replies = _ask_all(client, asked, max_tokens)
            seconds = time.monotonic() - started
        note("server stopped")
    _print(replies, seconds, as_json)
    _check(replies)


def _persona_folders(personas: Path) -> list[Path]:
    found = sorted(path.parent for path in personas.glob(f"*/{CONFIG_NAME}"))
    if not found:
        raise CliError(
            f"--personas: no adapters below {personas}; run from a source checkout, or give another DIR",
            code=ExitCode.USAGE,
        )
    return found


def _upload(client: "Client", folder: Path) -> None:
    with progress(in_bytes=True) as step:
        done = client.upload(
            read_peft_dir(folder), folder.name, progress=lambda what, *n: step(f"{what} {folder.name}", *n)
        )
    report = done["report"]
    note(f"uploaded {done['id']}@{done['version']}: {report['modules_matched']} modules, rank {report['rank_max']}")


@contextmanager
def _running_server(model: str, store: Path) -> Iterator[str]:
    with running_server(["--model", model, "--store", str(store)]) as url:
        yield url


# Questions and answers ---------------------------------------------------------------------------------------------
def _ask_all(client: "Client", asked: dict[str, str], max_tokens: int) -> list[PersonaReply]:
    """Send each question to each model concurrently, so that they share the server's batches."""
    jobs = [(name, model, question) for question in QUESTIONS for name, model in asked.items()]
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(lambda job: _ask(client, job[0], job[1], job[2], max_tokens), jobs))


def _ask(client: "Client", name: str, model: str, question: str, max_tokens: int) -> PersonaReply:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    answer = client.chat(body)
    text = "".join(answer).strip()
    if answer.finish_reason not in ("stop", "length"):
        raise CliError(f"the answer of {name} ended with {answer.finish_reason}")
    tokens = answer.usage["completion_tokens"]
    return PersonaReply(
        asked=name,
        question=question,
        text=text,
        adapter=answer.headers.get("x-adapter-id"),
        digest=answer.headers.get("x-adapter-digest"),
        tokens=tokens,
        tokens_per_s=round(1000 * tokens / answer.usage["lorasrv"]["total_ms"], 1),
    )


def _check(replies: Sequence[PersonaReply]) -> None:
    """Fail if the adapters have no visible effect."""
    base = {reply.question: reply for reply in replies if reply.asked == BASE}
    for reply in replies:
        if not reply.text:
            raise CliError(f"{reply.asked} gave no answer to: {reply.question}")
        expected = None if reply.asked == BASE else reply.asked
        if reply.adapter != expected:
            raise CliError(f"{reply.asked} was asked, but {reply.adapter or 'the base'} answered")
        if reply.asked != BASE and reply.text == base[reply.question].text:
            raise CliError(f"{reply.asked} answered as the base does: the adapter changes nothing")


def _print(replies: Sequence[PersonaReply], seconds: float, as_json: bool) -> None:
    tokens = sum(reply.tokens for reply in replies)
    total = {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds, 1)}
    if as_json:
        print_json({"replies": [asdict(reply) for reply in replies], **total})
        return
    if out().is_terminal:
        _print_table(replies)
    else:
        _print_lines(replies)
    say(f"{tokens} tokens in {seconds:.1f} s: {total['tokens_per_s']} tokens/s over {len(replies)} answers at once")


def _print_table(replies: Sequence[PersonaReply]) -> None:
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(reply.asked for reply in replies))
    table = Table(show_lines=True, expand=True)
    for name in ("question", *names):
        table.add_column(name, ratio=1 if name == "question" else 2)
    for question in QUESTIONS:
        row = {reply.asked: reply for reply in replies if reply.question == question}
        cells = [Text.assemble(row[name].text, "\n\n", (_who(row[name]), "dim")) for name in names]
        table.add_row(Text(question), *cells)
    out().print(table)


def _print_lines(replies: Sequence[PersonaReply]) -> None:
    for question in QUESTIONS:
        say(f"Q: {question}")
        for reply in (r for r in replies if r.question == question):
            say(f"  {_who(reply)}")
            for line in reply.text.splitlines():
                say(f"    {line}")


def _who(reply: PersonaReply) -> str:
    who = f"{reply.adapter} {short_digest(reply.digest)}" if reply.adapter and reply.digest else BASE
    return f"[{who}] {reply.tokens} tokens, {reply.tokens_per_s} tokens/s"
