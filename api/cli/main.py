"""Entry point of the `lorasrv` command. Subcommands import what they need when they run: `--help` stays fast."""

import os
import sys
from typing import NoReturn

import typer

from adapter_store.errors import AdapterError, AdapterInvalid
from api.cli import adapters, aliases, bench, check, demo, limits, plan, pool, quantize, serve, store, talk, verify
from api.cli.console import CliError, ExitCode, note
from api.cli.options import spread
from lorasrv import __version__
from lorasrv.errors import ConfigError, LorasrvError

app = typer.Typer(
    name="lorasrv",
    help="One base model, many LoRA adapters, every request in one batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("upload")(adapters.upload)
app.command("list")(adapters.list_adapters)
app.command("show")(adapters.show)
app.command("rm")(adapters.rm)
app.command("alias")(aliases.alias)
app.command("rollback")(aliases.rollback)
app.command("warm")(pool.warm)
app.command("pin")(pool.pin)
app.command("unpin")(pool.unpin)
app.command("limit")(limits.limit)
app.command("verify")(verify.verify)
app.command("pool")(pool.pool)
app.command("chat")(talk.chat)
app.command("generate")(talk.generate)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("quantize")(quantize.quantize)
app.command("demo")(demo.demo)
app.add_typer(store.app, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Options that stand before the subcommand."""


def main() -> NoReturn:
    """Run the command; whatever goes wrong becomes one clear line and an exit code."""
    try:
        app(args=spread(sys.argv[1:]))
    except CliError as error:
        _end(str(error), error.details, error.code)
    except AdapterInvalid as error:
        _end("the adapter is refused", [_problem(p.field, p.message, p.code) for p in error.problems])
    except ConfigError as error:
        _end(str(error), code=ExitCode.USAGE)
    except (LorasrvError, AdapterError) as error:
        _end(str(error))
    except KeyboardInterrupt:
        _end("interrupted", code=ExitCode.REFUSED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _end(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:
        if os.environ.get("LORASRV_TRACEBACK"):
            raise
        _end(f"unexpected {type(error).__name__}: {error}", ["LORASRV_TRACEBACK=1 shows where; please report it"])
    sys.exit(ExitCode.DONE)


def _problem(field: str, message: str, code: str) -> str:
    return f"{field + ': ' if field else ''}{message} ({code})"


def _end(message: str, details: list[str] | None = None, code: ExitCode = ExitCode.REFUSED) -> NoReturn:
    note(f"lorasrv: {message}")
    for line in details or []:
        note(f"  {line}")
    sys.exit(code)
