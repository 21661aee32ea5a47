"""Request one completion from a running server (generate), with helpers that chat shares."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.formats import strict_json
from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import JsonOption, ServerOption, complete_adapter_ids, connected
from api.cli.common.terminal import CliError, ExitCode, note, print_json, printable, say, short_digest, stdin_text

if TYPE_CHECKING:
    from api.client import StreamedAnswer

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_SAMPLING, _SHAPE, _SERVICE = "Sampling", "Form of the answer", "Service"


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


SystemOption = Annotated[str | None, typer.Option("--system", help="System message.")]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter", "-a", "--model", help="Adapter; by default the base model.", autocompletion=complete_adapter_ids
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """Define request options of `chat` and `generate`, named like the fields of the request's body."""

    max_tokens: Annotated[int | None, _option("Maximum number of tokens of an answer.", _SAMPLING, min=1)] = None
    temperature: Annotated[
        float | None, _option("Sampling temperature; 0 takes the most likely token.", _SAMPLING, min=0.0)
    ] = None
    top_p: Annotated[
        float | None, _option("Sample from the most likely tokens up to this total probability.", _SAMPLING)
    ] = None
    top_k: Annotated[int | None, _option("Sample from this many of the most likely tokens; 0 for all.", _SAMPLING)] = (
        None
    )
    min_p: Annotated[
        float | None, _option("Minimum probability of a token, relative to the most likely one.", _SAMPLING)
    ] = None
    seed: Annotated[int | None, _option("Seed that makes sampling repeatable.", _SAMPLING)] = None
    stop: Annotated[list[str] | None, _option("Text to stop before; may be repeated.", _SAMPLING)] = None
    presence_penalty: Annotated[float | None, _option("Penalty on tokens already generated, -2 to 2.", _SAMPLING)] = (
        None
    )
    frequency_penalty: Annotated[
        float | None, _option("Penalty on tokens by how often they were generated, -2 to 2.", _SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, _option("Divisor for tokens of the prompt and the answer; 1 for none.", _SAMPLING)
    ] = None
    priority: Annotated[int | None, _option("Priority; lower values go first, 0 is the default.", _SERVICE)] = None
    timeout_s: Annotated[
        float | None,
        _option("Time after which the server gives up.", _SERVICE, "--timeout", metavar="SECONDS", min=0.0),
    ] = None
    on_cold: Annotated[
        str | None, _option("If the adapter is not in the pool: wait, reject or fallback_base.", _SERVICE)
    ] = None
    field: Annotated[
        list[str] | None,
        _option(
            "Further field of the request's body; the value is JSON, or else text.", _SERVICE, metavar="NAME=VALUE"
        ),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the given fields of the request's body.

        Raises: CliError: --field is not NAME=VALUE.
        """
        return _given(asdict(self) | {"field": None}) | _fields(self.field)

    def flags(self) -> dict[str, str]:
        """Return the option that each field of the body comes from."""
        own = _flags(_given(asdict(self) | {"field": None}))
        return own | {name: f"--field {name}" for name in _fields(self.field)}


@dataclass(frozen=True)
class GenerateOptions:
    """Define request options that only `generate` has."""

    min_tokens: Annotated[int | None, _option("Minimum number of tokens of an answer.", _SAMPLING, min=0)] = None
    ignore_eos: Annotated[bool, _option("Do not stop at the end-of-sequence token.", _SAMPLING, "--ignore-eos")] = False
    logit_bias: Annotated[
        list[str] | None,
        _option("Bias to add to a token's logit; may be repeated.", _SAMPLING, metavar="TOKEN_ID=BIAS"),
    ] = None
    n: Annotated[int | None, _option("Number of answers.", _SHAPE, "-n", "--n", min=1)] = None
    logprobs: Annotated[
        int | None, _option("Return log-probabilities, with this many alternatives per token.", _SHAPE, min=0)
    ] = None
    json_object: Annotated[bool, _option("Answer with a JSON object.", _SHAPE, "--json-object")] = False
    json_schema: Annotated[
        Path | None, _option("Answer with JSON that matches this schema.", _SHAPE, metavar="FILE")
    ] = None
    regex: Annotated[str | None, _option("Answer with text that matches this expression.", _SHAPE)] = None
    choice: Annotated[list[str] | None, _option("Answer with one of these texts; may be repeated.", _SHAPE)] = None
    grammar: Annotated[Path | None, _option("Answer with text that matches this grammar.", _SHAPE, metavar="FILE")] = (
        None
    )

    def body(self, raw: bool) -> dict[str, Any]:
        """Return the given fields of the request's body.

        Raises:
            CliError: a bias cannot be parsed, or several constraints on the answer's form are given.
        """
        wanted = {
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos or None,
            "logit_bias": _biases(self.logit_bias),
            "n": self.n,
            **_logprobs(self.logprobs, raw),
            **_form(self.json_object, self.json_schema, self.regex, self.choice, self.grammar),
        }
        return _given(wanted)

    def flags(self, raw: bool) -> dict[str, str]:
        """Return the option that each field of the body comes from."""
        of_form = "--json-object" if self.json_schema is None else "--json-schema"
        return _flags(self.body(raw)) | {"response_format": of_form}


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads it from stdin.")],
    sampling: SamplingOptions,
    form: GenerateOptions,
    adapter: AdapterOption = None,
    system: SystemOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without a chat template, for models that have none.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Request one answer and print it."""
    body = form.body(raw) | sampling.body()
    text = stdin_text() if prompt == "-" else prompt
    if raw and system:
        raise CliError(
            "--raw and --system exclude each other: a plain prompt has no system message", code=ExitCode.USAGE
        )
    messages = [*system_message(system), {"role": "user", "content": text}]
    with connected(server, flags=form.flags(raw) | sampling.flags()) as client:
        model = adapter or client.base_name()
        if raw:
            answer = client.complete({"model": model, "prompt": text, **body})
        else:
            answer = client.chat({"model": model, "messages": messages, **body})
        show(answer, as_json or body.get("n", 1) not in (None, 1))
        if as_json:
            print_json(as_object(answer))
        else:
            _print_rest(answer)
            print_footer(answer)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Remove options that are not set."""
    return {name: value for name, value in options.items() if value is not None}


_FLAGS = {
    "timeout_s": "--timeout",
    "top_logprobs": "--logprobs",
    "guided_regex": "--regex",
    "guided_choice": "--choice",
    "guided_grammar": "--grammar",
}
"""Options with another name than their field."""


def _flags(body: Mapping[str, Any]) -> dict[str, str]:
    return {name: _FLAGS.get(name, f"--{name.replace('_', '-')}") for name in body}


def system_message(text: str | None) -> list[dict[str, str]]:
    """Return the system message of a conversation as a list, empty without one."""
    return [{"role": "system", "content": text}] if text else []


def _fields(texts: list[str] | None) -> dict[str, Any]:
    """Parse --field.

    Raises: CliError: it is not NAME=VALUE, or JSON that is not strict.
    """
    found = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise CliError(f"--field {text!r}: expected NAME=VALUE, as in typical_p=0.9", code=ExitCode.USAGE)
        try:
            found[name] = strict_json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
        except (ValueError, RecursionError) as error:
            raise CliError(f"--field {name}: {error}", code=ExitCode.USAGE) from None
    return found


def _logprobs(alternatives: int | None, raw: bool) -> dict[str, Any]:
    """Return the fields that request log-probabilities; they differ between OpenAI's two routes."""
    if raw:
        return {"logprobs": alternatives}
    return {"logprobs": None if alternatives is None else True, "top_logprobs": alternatives or None}


def _biases(texts: list[str] | None) -> dict[str, float] | None:
    found = {}
    for text in texts or []:
        token, _, bias = text.partition("=")
        try:
            found[str(int(token))] = _finite(bias)
        except ValueError:
            raise CliError(f"--logit-bias {text!r}: expected TOKEN_ID=BIAS, as in 42=-5", code=ExitCode.USAGE) from None
    return found or None


def _finite(text: str) -> float:
    """Parse a number that JSON can represent.

    Raises: ValueError: the text is no number, NaN or infinite.
    """
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _form(
    json_object: bool, json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> dict[str, Any]:
    """Return the field that constrains the answer's form, {} without one; the server validates its value."""
    wanted: list[dict[str, Any]] = []
    if json_object:
        wanted.append({"response_format": {"type": "json_object"}})
    if json_schema is not None:
        schema = {"name": json_schema.stem, "schema": _read_schema(json_schema), "strict": True}
        wanted.append({"response_format": {"type": "json_schema", "json_schema": schema}})
    if regex is not None:
        wanted.append({"guided_regex": regex})
    if choice:
        wanted.append({"guided_choice": choice})
    if grammar is not None:
        wanted.append({"guided_grammar": _read_text(grammar, "--grammar")})
    if len(wanted) > 1:
        message = "--json-object, --json-schema, --regex, --choice and --grammar exclude each other"
        raise CliError(message, code=ExitCode.USAGE)
    return wanted[0] if wanted else {}


def _read_schema(path: Path) -> Any:
    try:
        return strict_json.loads(_read_text(path, "--json-schema"))
    except (ValueError, RecursionError) as error:
        raise CliError(f"--json-schema: {path} is not JSON: {error}", code=ExitCode.USAGE) from None


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8"
        raise CliError(f"{flag}: {path} cannot be read: {why}", code=ExitCode.USAGE) from None


# Output.
def show(answer: "StreamedAnswer", quietly: bool) -> None:
    """Print the text as it arrives, and on a terminal the dimmed reasoning; with `quietly`, only receive the answer."""
    is_reasoning = False
    for piece in answer.pieces():
        if quietly or (piece.is_reasoning and not sys.stdout.isatty()):
            continue
        text = printable(piece.text, sys.stdout)
        if is_reasoning and not piece.is_reasoning:
            print("\n")
        is_reasoning = piece.is_reasoning
        print(f"{_DIM}{text}{_PLAIN}" if is_reasoning else text, end="", flush=True)
    if not quietly:
        print(flush=True)


def as_object(answer: "StreamedAnswer") -> dict[str, Any]:
    """Return an answer as JSON data, with choices and log-probabilities if requested."""
    names = ("x-request-id", "x-adapter-id", "x-adapter-version", "x-adapter-digest", "x-adapter-tier")
    source = {name.removeprefix("x-").replace("-", "_"): answer.headers.get(name) for name in names}
    choices = [answer.choices[index] for index in sorted(answer.choices)]
    first = choices[0] if choices else None
    reason = first.finish_reason if first else None
    shown: dict[str, Any] = {"text": first.text if first else "", "finish_reason": reason, **source}
    if first and first.reasoning:
        shown["reasoning"] = first.reasoning
    if len(choices) > 1 or any(choice.logprobs for choice in choices):
        shown["choices"] = [
            {"text": choice.text, "finish_reason": choice.finish_reason, "logprobs": choice.logprobs}
            | ({"reasoning": choice.reasoning} if choice.reasoning else {})
            for choice in choices
        ]
    return {**shown, "usage": answer.usage}


def _print_rest(answer: "StreamedAnswer") -> None:
    """Print what was not streamed: several choices, and log-probabilities with one line per token."""
    several = len(answer.choices) > 1
    for index in sorted(answer.choices):
        choice = answer.choices[index]
        if several:
            say(f"--- {index + 1} of {len(answer.choices)} ({choice.finish_reason})")
            if choice.reasoning and sys.stdout.isatty():
                print(f"{_DIM}{printable(choice.reasoning, sys.stdout)}{_PLAIN}\n")
            say(choice.text)
        for entry in choice.logprobs:
            others = [f"{other['token']!r} {other['logprob']:.4f}" for other in entry.get("top_logprobs") or []]
            # The first token of an echoed prompt has none.
            own = "-" if entry["logprob"] is None else f"{entry['logprob']:.4f}"
            say("\t".join((repr(entry["token"]), own, *others)))


def print_footer(answer: "StreamedAnswer") -> None:
    """Print the responding model and its speed, on a terminal only."""
    if not sys.stderr.isatty():
        return
    digest = answer.headers.get("x-adapter-digest")
    model = f"{answer.headers['x-adapter-id']} {short_digest(digest)}" if digest else "base"
    tokens, ms = answer.usage.get("completion_tokens", 0), answer.usage.get("lorasrv", {}).get("total_ms")
    speed = f", {1000 * tokens / ms:.1f} tokens/s" if ms else ""
    note(f"[{model}, {tokens} tokens{speed}, {answer.finish_reason}]")
