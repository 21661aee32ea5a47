"""Read and write a persona's defaults as files, and format them for people."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapter_store.formats import strict_json
from api.cli.common.formatting import counted, report_lines
from api.cli.common.terminal import CliError, short_digest
from lorasrv.config import size

SHOWN_APART = ("name", "system", "examples", "greetings", "adapters")
INDENT = "  "
MAX_FILE_BYTES = 64 << 20


def read_defaults(path: Path) -> dict[str, Any]:
    """Read a file of defaults; the server checks its fields.

    Raises:
        CliError: the file cannot be read, or is not a JSON object.
    """
    with read_from(path, "a JSON file of defaults") as data:
        try:
            found = strict_json.loads(text_of(data))
        except (ValueError, RecursionError) as error:
            raise CliError(f"is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise CliError("is not a JSON object")
        return found


def valid_defaults(path: Path) -> dict[str, Any]:
    """Read a file of defaults, and check it as the server does, before anything is sent.

    Raises:
        CliError: as for `read_defaults`, or a field is unknown or wrong.
    """
    from api.schemas.personas import Defaults

    found = read_defaults(path)
    try:
        Defaults.from_text(json.dumps(found))
    except ValueError as error:
        raise CliError(f"{path}: {error}") from None
    return found


@contextmanager
def read_from(path: Path, wanted: str) -> Iterator[bytes]:
    """Read a file, and add its name to the errors that the block raises.

    Args:
        wanted: description of the expected file, for errors.

    Raises:
        CliError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CliError(f"{path}: cannot be read ({error.strerror}); name {wanted}") from None
    if len(data) > MAX_FILE_BYTES:
        raise CliError(f"{path}: has more than {MAX_FILE_BYTES >> 20} MiB; name {wanted}")
    try:
        yield data
    except CliError as error:
        raise CliError(f"{path}: {error}") from None


def text_of(data: bytes) -> str:
    """Return a file's text.

    Raises:
        CliError: the file is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(f"is not UTF-8 (byte {error.start}); save it as UTF-8 text") from None


def to_file(defaults: Mapping[str, Any]) -> str:
    """Return the text of a file with these defaults. Reading and writing it again gives the same bytes."""
    return json.dumps(defaults, indent=2, ensure_ascii=False) + "\n"


def registered_lines(done: Mapping[str, Any]) -> Iterator[str]:
    """Format the response to a registration."""
    state = "registered" if done["created"] else "unchanged:"
    digest = short_digest(done["digest"]) if done["digest"] else "no weights of its own"
    yield f"{state} {done['id']}@{done['version']}  {digest}"
    for line in report_lines(done["report"]):
        yield INDENT + line
    if (persona := done.get("persona")) is not None:
        tokens = persona["prompt_tokens"]
        takes = "" if tokens is None else f", {tokens} tokens of prompt with a short turn"
        yield f"{INDENT}defaults {short_digest(persona['digest'])}{takes}"
        yield from (f"{INDENT}warning: {warning}" for warning in persona["warnings"])


def persona_lines(persona: Mapping[str, Any] | None) -> Iterator[str]:
    """Format a persona for people; no lines without defaults."""
    if persona is None:
        return
    yield f"persona {persona['name']}, defaults {short_digest(persona['digest'])}"
    defaults = persona["defaults"]
    if defaults is None:
        yield f"{INDENT}sets {', '.join(persona['fields'])}; only its owner and administrators see how"
    else:
        yield from (INDENT + line for line in _default_lines(defaults))
    if gone := persona.get("deleted_parts"):
        yield f"{INDENT}{counted(gone, 'adapter')} of the sum deleted: it is refused until it is composed anew"
    if (made := persona.get("snapshot")) is not None:
        yield f"{INDENT}snapshot of {made['tokens']} tokens of prompt, {size(made['bytes'])}"
    for greeting in persona["greetings"]:
        yield from _block(f"{INDENT}greets:", greeting)


def _default_lines(defaults: Mapping[str, Any]) -> Iterator[str]:
    system = defaults.get("system")
    if system is not None:
        prompt = {"text": system} if isinstance(system, str) else system
        yield from _block(f"system prompt ({prompt.get('mode', 'default')}):", prompt["text"])
    for number, dialogue in enumerate(defaults.get("examples", ()), 1):
        turns = "\n".join(f"{message['role']}: {message['content']}" for message in dialogue)
        yield from _block(f"example {number}:", turns)
    if adapters := defaults.get("adapters"):
        yield "sum of " + " + ".join(f"{each['weight']:g} * {each['id']}" for each in adapters)
    for name, value in defaults.items():
        if name not in SHOWN_APART:
            yield f"{name} {json.dumps(value, ensure_ascii=False)}"


def _block(title: str, text: str) -> Iterator[str]:
    indent = " " * (len(title) - len(title.lstrip()))
    yield title
    yield from (f"{indent}{INDENT}{line}".rstrip() for line in text.splitlines())
