"""Talk to an adapter (chat).

On a terminal, commands are available, and errors do not end the conversation. From a pipe, every line is a question,
answers are plain text, and the first error ends the command.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.commands.generate import (
    AdapterOption,
    SamplingOptions,
    SystemOption,
    as_object,
    print_footer,
    show,
    system_message,
)
from api.cli.common.options import JsonOption, ServerOption, complete_adapter_ids, connected
from api.cli.common.terminal import MULTILINE, CliError, ExitCode, note, print_json, stdin_lines

if TYPE_CHECKING:
    from api.client import Client, StreamedAnswer

HELP = (
    "/adapter ID   switch to another adapter; keeps the history",
    "/base         switch to the base model",
    "/reset        clear the history, as /clear does",
    "/help         show this list",
    "/quit         quit, as /bye and Ctrl-D do",
    '"""           begins and ends a message of several lines',
    "Ctrl-C stops an answer; //text sends a message that begins with a slash.",
)


def chat(
    sampling: SamplingOptions,
    adapter_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Adapter, as with --adapter; by default the base.",
            autocompletion=complete_adapter_ids,
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Ask only this question, and exit.")
    ] = None,
    adapter: AdapterOption = None,
    system: SystemOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Talk to an adapter; /help lists the commands. Questions may also come from a pipe, one per line."""
    adapter_id, question = _who_and_what(adapter_id, question, adapter)
    body = sampling.body()
    with connected(server, flags=sampling.flags()) as client:
        base = client.base_name()
        conversation = Conversation(client, base, adapter_id or base, body, system, as_json)
        if question is not None:
            conversation.ask(question)
        elif sys.stdin.isatty():
            if adapter_id is not None:
                conversation.switch_to(adapter_id)
            _chat_on_terminal(conversation)
        else:
            for line in map(str.strip, stdin_lines()):
                if line:
                    conversation.ask(line)


def _who_and_what(first: str | None, second: str | None, adapter: str | None) -> tuple[str | None, str | None]:
    """Return the adapter and the question of `[ID] [QUESTION] [--adapter ID]`.

    The first argument is the question if --adapter is given, or if it has several words and thus cannot be an id.

    Raises:
        CliError: the adapter is given twice.
    """
    if second is not None and adapter is not None:
        raise CliError(f"give the adapter once: {first}, or --adapter {adapter}", code=ExitCode.USAGE)
    if second is None and first is not None and (adapter is not None or len(first.split()) > 1):
        return adapter, first
    return first or adapter, second


class Conversation:
    """Hold the history and the model of a conversation."""

    def __init__(
        self, client: "Client", base: str, model: str, body: Mapping[str, Any], system: str | None, as_json: bool
    ) -> None:
        self._client = client
        self._is_terminal = sys.stdin.isatty()
        self.base = base
        self.model = model
        self._body = body
        self._opening = system_message(system)
        self._messages = list(self._opening)
        self._as_json = as_json

    def ask(self, text: str) -> None:
        """Ask a question, and print the answer.

        If Ctrl-C ends the answer, the received part is added to the history. A question without an answer is not.

        Raises:
            ServerUnreachable, Refused.
            KeyboardInterrupt: outside a terminal.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = None
        try:
            answer = self._client.chat({**self._body, "model": self.model, "messages": messages})
            show(answer, self._as_json)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            print(flush=True)
            note("[stopped]")
        if answer is None:
            return
        answer.close()
        if answer.finish_reason is not None:
            self._print_end(answer)
        if content := answer.choices[min(answer.choices)].text if answer.choices else "":
            self._messages = [*messages, {"role": "assistant", "content": content}]

    def _print_end(self, answer: "StreamedAnswer") -> None:
        if self._as_json:
            print_json(as_object(answer))
        else:
            print_footer(answer)

    def switch_to(self, reference: str) -> None:
        """Continue with another adapter.

        Raises: ServerUnreachable, Refused: the adapter does not exist.
        """
        self._client.name_of(reference)
        self.model = reference

    def adapters(self, prefix: str = "") -> list[str]:
        """Return adapter ids with a prefix; [] on any error."""
        try:
            return [name for a in self._client.adapters() if (name := str(a["id"])).startswith(prefix)]
        except Exception:
            return []

    def reset(self) -> None:
        """Clear the history except for the system message."""
        self._messages = list(self._opening)


# On a terminal.
def _chat_on_terminal(conversation: Conversation) -> None:
    from api.client import Refused, ServerUnreachable

    note(f"{conversation.model}; /help lists commands, Ctrl-D quits")
    for line in _lines(conversation):
        try:
            if line.startswith("/") and not line.startswith("//"):
                if _run_command(conversation, line) == "quit":
                    return
            else:
                conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
        except (Refused, ServerUnreachable) as error:
            print(flush=True)
            note(f"lorasrv: {error}")


def _lines(conversation: Conversation) -> Iterator[str]:
    """Yield the typed messages. Ctrl-C discards the current one."""
    _prepare_readline(conversation)
    while True:
        try:
            line = _message(f"{conversation.model}> ")
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
            continue
        if line:
            yield line


def _message(prompt: str) -> str:
    """Read a line, or the lines between two triple quotes; such lines are never a command."""
    line = _read(prompt).strip()
    if not line.startswith(MULTILINE):
        return line
    text = line.removeprefix(MULTILINE)
    while not text.rstrip().endswith(MULTILINE):
        text += "\n" + _read("... ").rstrip("\n")
    text = text.rstrip().removesuffix(MULTILINE).strip()
    return f"/{text}" if text.startswith("/") else text


def _read(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    # Write the prompt to stderr, because stdout may be redirected and should contain only answers.
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _prepare_readline(conversation: Conversation) -> None:
    """Enable arrow keys, history, and completion of ids after /adapter, if Python was built with readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completer(conversation))
    readline.parse_and_bind("tab: complete")


def _completer(conversation: Conversation) -> Callable[[str, int], str | None]:
    names: list[str] = []

    def complete(text: str, state: int) -> str | None:
        nonlocal names
        if state == 0:
            words = [line.split()[0] for line in HELP if line.startswith("/")]
            found = words if text.startswith("/") else conversation.adapters(text)
            names = [name for name in found if name.startswith(text)]
        return names[state] if state < len(names) else None

    return complete


def _run_command(conversation: Conversation, line: str) -> str | None:
    """Run a command of the chat; returns "quit" if the chat should end.

    Raises: Refused, ServerUnreachable.
    """
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    match command:
        case "/adapter" if argument:
            conversation.switch_to(argument)
        case "/adapter":
            note("give an adapter id: " + (", ".join(conversation.adapters()) or "none yet; lorasrv upload adds one"))
        case "/base":
            conversation.model = conversation.base
        case "/reset" | "/clear":
            conversation.reset()
            note("history cleared")
        case "/help":
            for text in HELP:
                note(text)
        case "/quit" | "/exit" | "/bye":
            return "quit"
        case _:
            note(f"unknown command {command}; /help lists the commands")
    return None
