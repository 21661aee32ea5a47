"""chat and generate: text from a running server."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.address import DEFAULT_SERVER
from api.cli.console import note, print_json, short_digest
from api.cli.options import JsonOption, ServerOption, connected

if TYPE_CHECKING:
    from api.client import Client, StreamedAnswer

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Share of the probability that is sampled from.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Priority = Annotated[int | None, typer.Option(help="Lower goes first; 0 is usual.")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up after so long.")]
System = Annotated[str | None, typer.Option(help="System message.")]


def chat(
    adapter_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Adapter; the base if left out.")] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    priority: Priority = None,
    timeout: Timeout = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Talk to an adapter, line by line; an empty line or Ctrl-D ends. Lines may also come from a pipe."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    service = {"priority": priority, "timeout_s": timeout}
    messages = [{"role": "system", "content": system}] if system else []
    with connected(server) as client:
        body = {"model": adapter_id or client.base_name(), **_given(sampling | service)}
        for line in _turns():
            messages.append({"role": "user", "content": line})
            text = _answer(client, {**body, "messages": messages}, as_json)
            messages.append({"role": "assistant", "content": text})


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Adapter; the base if left out.")] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    priority: Priority = None,
    timeout: Timeout = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Ask once and print the answer."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    service = {"priority": priority, "timeout_s": timeout}
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    with connected(server) as client:
        model = adapter or client.base_name()
        _answer(client, {"model": model, "messages": messages, **_given(sampling | service)}, as_json)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _turns() -> Iterator[str]:
    """What the user says, until an empty line or the end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _answer(client: "Client", body: dict[str, Any], as_json: bool) -> str:
    """Ask and print: the text as it comes, or everything as one line of JSON."""
    answer = client.chat(body)
    pieces = []
    for piece in answer:
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    text = "".join(pieces)
    if as_json:
        print_json(_as_json(answer, text))
    else:
        print(flush=True)
        _print_footer(answer)
    return text


def _as_json(answer: "StreamedAnswer", text: str) -> dict[str, Any]:
    names = ("x-request-id", "x-adapter-id", "x-adapter-version", "x-adapter-digest", "x-adapter-tier")
    who = {name.removeprefix("x-").replace("-", "_"): answer.headers.get(name) for name in names}
    return {"text": text, "finish_reason": answer.finish_reason, **who, "usage": answer.usage}


def _print_footer(answer: "StreamedAnswer") -> None:
    """Who answered and how fast, for people only."""
    if not sys.stderr.isatty():
        return
    digest = answer.headers.get("x-adapter-digest")
    who = f"{answer.headers['x-adapter-id']} {short_digest(digest)}" if digest else "base"
    tokens, ms = answer.usage.get("completion_tokens", 0), answer.usage.get("lorasrv", {}).get("total_ms")
    speed = f", {1000 * tokens / ms:.1f} tokens/s" if ms else ""
    note(f"[{who}, {tokens} tokens{speed}, {answer.finish_reason}]")
