"""chat: a conversation with an adapter. At a terminal with commands, and errors that do not end it; from a pipe a
question a line, as a script would have it: plain answers, and the first error ends.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.commands.generate import SamplingOptions, System, as_object, print_footer, show, system_message
from api.cli.common.options import JsonOption, ServerOption, complete_adapter_ids, connected
from api.cli.common.terminal import note, print_json, stdin_lines

if TYPE_CHECKING:
    from api.client import Client, StreamedAnswer

HELP = (
    "/adapter ID   go on with another adapter; what was said stays",
    "/base         go on with the base",
    "/reset        forget what was said",
    "/help         this",
    "/quit         end, as Ctrl-D does",
    "Ctrl-C ends an answer; //text is a message that begins with a stroke.",
)


def chat(
    sampling: SamplingOptions,
    adapter_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Adapter; the base if left out.", autocompletion=complete_adapter_ids),
    ] = None,
    system: System = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Talk to an adapter; /help in it lists its commands. Questions may also come from a pipe, one a line."""
    body = sampling.body()
    with connected(server) as client:
        base = client.base_name()
        talk = Conversation(client, base, adapter_id or base, body, system, as_json)
        if sys.stdin.isatty():
            if adapter_id is not None:
                talk.go_on_with(adapter_id)
            _at_a_terminal(talk)
        else:
            for line in map(str.strip, stdin_lines()):
                if line:
                    talk.say(line)


class Conversation:
    """What was said, and with whom it goes on."""

    def __init__(
        self, client: "Client", base: str, model: str, body: Mapping[str, Any], system: str | None, as_json: bool
    ) -> None:
        self._client = client
        self._at_a_terminal = sys.stdin.isatty()
        self.base = base
        self.model = model
        self._body = body
        self._opening = system_message(system)
        self._messages = list(self._opening)
        self._as_json = as_json

    def say(self, text: str) -> None:
        """Ask, and print the answer. What was not answered is not part of the history; of an answer that Ctrl-C ended
        it is what had come.

        Raises:
            ServerUnreachable, Refused.
            KeyboardInterrupt: not at a terminal.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = None
        try:
            answer = self._client.chat({**self._body, "model": self.model, "messages": asked})
            show(answer, self._as_json)
        except KeyboardInterrupt:
            if not self._at_a_terminal:
                raise
            print(flush=True)
            note("[stopped]")
        if answer is None:
            return
        answer.close()
        if answer.finish_reason is not None:
            self._tell(answer)
        if said := answer.choices[min(answer.choices)].text if answer.choices else "":
            self._messages = [*asked, {"role": "assistant", "content": said}]

    def _tell(self, answer: "StreamedAnswer") -> None:
        if self._as_json:
            print_json(as_object(answer))
        else:
            print_footer(answer)

    def go_on_with(self, reference: str) -> None:
        """Raises: ServerUnreachable, Refused: there is no such adapter."""
        self._client.name_of(reference)
        self.model = reference

    def adapters(self, beginning: str = "") -> list[str]:
        """Ids that begin so; none if they cannot be had."""
        try:
            return [name for a in self._client.adapters() if (name := str(a["id"])).startswith(beginning)]
        except Exception:
            return []

    def reset(self) -> None:
        """Forget what was said, but for the system message."""
        self._messages = list(self._opening)


# At a terminal.
def _at_a_terminal(talk: Conversation) -> None:
    from api.client import Refused, ServerUnreachable

    note(f"{talk.model}; /help lists commands, Ctrl-D ends")
    for line in _lines(talk):
        try:
            if line.startswith("/") and not line.startswith("//"):
                if _obey(talk, line) == "quit":
                    return
            else:
                talk.say(line.removeprefix("/") if line.startswith("//") else line)
        except (Refused, ServerUnreachable) as error:
            print(flush=True)
            note(f"lorasrv: {error}")


def _lines(talk: Conversation) -> Iterator[str]:
    """What is typed. Ctrl-C takes a line back."""
    _prepare_readline(talk)
    while True:
        try:
            line = _read(f"{talk.model}> ").strip()
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
            continue
        if line:
            yield line


def _read(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    # Answers go to a file: the prompt must not.
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _prepare_readline(talk: Conversation) -> None:
    """Arrow keys, what was typed before, and Tab behind /adapter; where Python was built with it."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completer(talk))
    readline.parse_and_bind("tab: complete")


def _completer(talk: Conversation) -> Callable[[str, int], str | None]:
    names: list[str] = []

    def complete(text: str, state: int) -> str | None:
        nonlocal names
        if state == 0:
            words = [line.split()[0] for line in HELP if line.startswith("/")]
            names = [word for word in words if word.startswith(text)] if text.startswith("/") else talk.adapters(text)
        return names[state] if state < len(names) else None

    return complete


def _obey(talk: Conversation, line: str) -> str | None:
    """Raises: Refused, ServerUnreachable."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    match command:
        case "/adapter" if argument:
            talk.go_on_with(argument)
        case "/adapter":
            note("name one: " + (", ".join(talk.adapters()) or "there are none; lorasrv upload adds one"))
        case "/base":
            talk.model = talk.base
        case "/reset":
            talk.reset()
            note("forgotten")
        case "/help":
            for text in HELP:
                note(text)
        case "/quit" | "/exit":
            return "quit"
        case _:
            note(f"there is no {command}; /help lists what there is")
    return None
