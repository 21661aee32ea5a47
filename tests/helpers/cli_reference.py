"""docs/cli.md, written from the commands themselves: `python tests/helpers/cli_reference.py > docs/cli.md`."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import typer
from typer.main import get_command

from api.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

INTRO = """# The command line

Written by `tests/helpers/cli_reference.py` from the commands' own help; a test fails when it is stale.

Results go to stdout, everything else to stderr. At a terminal there are tables, colours and bars; in a pipe or a file
plain lines, cells separated by tabs; with `--json` one JSON value a line.

| exit code | means |
|---|---|
| 0 | done; also if whoever read the output had seen enough (`\\| head -1`), and of `serve` if it was told to stop |
| 1 | refused; the reason is on stderr |
| 2 | wrong usage: a flag, a variable, or a key of the configuration file |
| 3 | no server answers, or something else than lorasrv |
| 130 | interrupted by Ctrl-C |

## Configuration

The value of a `serve` option is that of its flag, else of `LORASRV_NAME` in the environment, else of a TOML file, else
the default. The file is that of `--config FILE` or `LORASRV_CONFIG`, else `~/.config/lorasrv/config.toml` if it exists
(`$XDG_CONFIG_HOME` is honoured). Keys are the flags' names, with `_` or `-`. An unknown key or a wrong value is one
line with the file, the key and the allowed values. Sizes are `512MiB`, `2GB` or bytes. The older name of an option
("Also `--policy`") works in all three places; giving both names in one place is an error.

```toml
port = 9000
pool_bytes = "2GiB"
lora_modules = ["mia=/srv/adapters/mia"]

[client]            # for the commands that call a server
server = "http://127.0.0.1:9000"
```

`lorasrv config init` prints a file with every option, commented out. `lorasrv config show --origin` prints the values
in force and where each was given, without secrets; flags of serve go behind `--`
(`lorasrv config show --origin -- --port 9000`). Each switch has an opposite (`--early-abort`, `--no-early-abort`),
so that a flag can override the file. Commands that call a server find it by `--server`, `LORASRV_SERVER` or
`[client]`, and authenticate with the key of `--api-key`, `LORASRV_API_KEY` or `[client]` ([security.md](security.md)).

`lorasrv --install-completion` teaches the shell to complete commands, flags and, from the server, adapter ids.
"""


def page() -> str:
    """The whole page."""
    return (
        "\n".join([INTRO, *(line for path, command in commands() for line in _command(path, command))]).rstrip() + "\n"
    )


def commands() -> Iterator[tuple[str, Any]]:
    """(name as it is typed, command) of all, those of groups behind their group."""
    root = get_command(app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            for inner, of_group in command.commands.items():
                yield f"{name} {inner}", of_group
        else:
            yield name, command


def parameters(command: Any) -> list[Any]:
    """Return the arguments and options of a command, generated ones included, but for --help."""
    return [param for param in command.get_params(typer.Context(command)) if param.name != "help"]


def examples(command: Any) -> list[str]:
    """As they are typed."""
    return [plain(text).removeprefix("Example: ") for text in (command.epilog or "").split("\n\n") if text]


def plain(text: str) -> str:
    """Without what keeps brackets from being markup."""
    return text.replace("\\[", "[")


def _command(path: str, command: Any) -> Iterator[str]:
    arguments = [param for param in parameters(command) if param.param_type_name == "argument" and not param.hidden]
    options = [param for param in parameters(command) if param.param_type_name == "option" and not param.hidden]
    yield f"## lorasrv {path}"
    yield ""
    yield re.sub(r"\s+", " ", plain(command.help or "")).strip()
    yield ""
    yield "```sh"
    yield from examples(command)
    yield "```"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for param in (*arguments, *options):
        yield f"| {_name(param)} | {_meaning(param)} |"
    yield ""


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{_cell(param.metavar or param.name.upper())}`"
    opts = ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
    return f"{opts} `{_cell(param.metavar)}`" if param.metavar else opts


def _meaning(param: Any) -> str:
    text = _cell(plain(param.help or ""))
    default = param.default
    shown = param.show_default and default not in (None, False, "") and not callable(default)
    if shown and not (isinstance(default, PurePath) and default.is_absolute()) and "[default:" not in text:
        text += f" [default: {default}]"
    return text + (f" (`{param.envvar}`)" if getattr(param, "envvar", None) else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
