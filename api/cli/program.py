"""The subcommands of `lorasrv`. They import their dependencies when they run, so that `--help` stays fast."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from adapter_store.errors import AdapterError, AdapterInvalid
from api.cli.bench import command as bench
from api.cli.commands import (
    adapters,
    aliases,
    batch,
    chat,
    check,
    config,
    demo,
    generate,
    keys,
    listing,
    pool,
    quantize,
    registry,
    serve,
    store,
    verify,
    watermark,
)
from api.cli.common.command_line import rewritten
from api.cli.common.options import ServerDefaults, with_api_key, with_finite_numbers, with_option_groups
from api.cli.common.settings_options import settings_command
from api.cli.common.suggestions import ELSEWHERE, commands_of, meant, options_of, owners_of
from api.cli.common.terminal import CliError, ExitCode, note
from api.cli.doctor import command as doctor
from api.cli.personas import command as personas
from api.cli.plan import command as plan
from api.cli.top import command as top
from lorasrv import __version__
from lorasrv.errors import ConfigError, LorasrvError

EXIT_CODES = (
    "Exit codes: 0 done, 1 refused (the reason is on stderr), 2 wrong usage, 3 server unreachable, 130 interrupted."
)
OF_SERVERS = ("serve", "registry", "doctor")
"""Commands that take a server's options."""
# Base class of errors in arguments; typer has no public name for it.
_UsageError: Any = typer.BadParameter.__mro__[1]


class _Interrupted(Exception):
    """Signal Ctrl-C, which typer would otherwise handle with its own message."""


class _PipeClosed(Exception):
    """Signal that the reader of our output has closed the pipe."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except BrokenPipeError:
            raise _PipeClosed from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if args and args[0] not in self.commands:
                error.message = _with_meant(f"No such command {args[0]!r}", meant(args[0], commands_of(self)))
            raise


app = typer.Typer(
    name="lorasrv",
    cls=_Group,
    help="Serve one base model with many LoRA adapters, every request in one batch.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(
    name: str,
    function: Callable[..., None],
    *examples: str,
    of: typer.Typer = app,
    cls: type[TyperCommand] = TyperCommand,
) -> None:
    """Add a subcommand with its examples."""
    # Each example is a paragraph. Brackets are escaped, because they would be markup.
    shown = [f"Example: {example}".replace("[", r"\[") for example in examples]
    wrapped = with_api_key(with_finite_numbers(with_option_groups(function)))
    of.command(name, cls=cls, epilog="\n\n".join(shown))(wrapped)


_command(
    "serve",
    serve.serve,
    "lorasrv serve --pool-bytes 2GiB --lora-modules mia=./mia",
    "LORASRV_PORT=9000 lorasrv serve ./Llama-3.2-1B",
    "lorasrv serve --replicas 2",
    cls=settings_command(positional="model"),
)
_command(
    "registry",
    registry.registry,
    "lorasrv registry --store ./adapters --cluster-secret-file ./secret",
    cls=settings_command(positional="model"),
)
_command(
    "upload",
    adapters.upload,
    "lorasrv upload ./mia",
    "lorasrv upload ./run-17 --id mia --alias prod",
    "lorasrv upload ./adapters --all --slugify",
)
_command("list", listing.list_adapters, "lorasrv list --json", "lorasrv list --store ./adapters")
_command("show", adapters.show, "lorasrv show mia")
_command(
    "defaults",
    personas.defaults,
    "lorasrv defaults mia > mia.json",
    "lorasrv defaults mia mia.json",
    "lorasrv defaults muse muse.json --new",
)
_command("compose", personas.compose, "lorasrv compose mia-night mia 0.5*whisper@3")
_command("snapshot", personas.snapshot, "lorasrv snapshot mia")
_command("import-card", personas.import_card, "lorasrv import-card ada.png --id ada")
_command("import-modelfile", personas.import_modelfile, "lorasrv import-modelfile Modelfile --id mario")
_command("rm", adapters.rm, "lorasrv rm mia@2 tom")
_command("alias", aliases.alias, "lorasrv alias mia:prod 3", "lorasrv alias mia:prod 3=0.9 4=0.1")
_command("rollback", aliases.rollback, "lorasrv rollback mia --to 2")
_command("warm", pool.warm, "lorasrv warm mia --deadline-ms 2000")
_command("pin", pool.pin, "lorasrv pin mia@3")
_command("unpin", pool.unpin, "lorasrv unpin mia@3")
_command("limit", aliases.limit, "lorasrv limit mia --max-running 4 --tokens-per-s 200")
_command("verify", verify.verify, "lorasrv verify mia --prompts prompts.txt")
_command("pool", pool.pool, "lorasrv pool")
_command("top", top.top, "lorasrv top --interval 1", "lorasrv top --once --json")
_command(
    "chat",
    chat.chat,
    "lorasrv chat mia --system 'You are a pirate.'",
    "lorasrv chat mia 'Who are you?'",
    "lorasrv chat mia < questions.txt",
)
_command(
    "generate",
    generate.generate,
    "lorasrv generate 'Name three rivers.' --adapter mia --temperature 0",
    "lorasrv generate - --json-schema city.json --json < prompt.txt",
)
_command("check", check.check, "lorasrv check ./mia --model ./Llama-3.2-1B", "lorasrv check ./mia --store ./adapters")
_command(
    "bench",
    bench.bench,
    "lorasrv bench --adapters 0,16 --concurrency 1,16",
    "lorasrv bench --url http://127.0.0.1:8000",
)
_command(
    "plan",
    plan.plan,
    "lorasrv plan --trace traffic.jsonl --pool-bytes 4GiB",
    cls=settings_command(*plan.SERVER_SETTINGS, panel=plan.SERVER_PANEL),
)
_command(
    "quantize",
    quantize.quantize,
    "lorasrv quantize llama-int4.safetensors --model ./Llama-3.2-1B",
)
_command(
    "doctor",
    doctor.doctor,
    "lorasrv doctor",
    "lorasrv doctor --model ./Llama-3.2-1B --rank 32",
    "lorasrv doctor --cluster --replicas 4",
    cls=settings_command(*doctor.SERVER_SETTINGS, panel="Server"),
)
_command(
    "batch",
    batch.batch,
    "lorasrv batch questions.jsonl answers.jsonl",
    "lorasrv batch questions.jsonl answers.jsonl --model smollm2-135m --store ./adapters",
    cls=settings_command(*batch.ENGINE_SETTINGS, panel="Engine of its own, without a server"),
)
_command("demo", demo.demo, "lorasrv demo")
_command("gc", store.gc, "lorasrv store gc --older-than 7d", of=store.app)
_command("fsck", store.fsck, "lorasrv store fsck --store ./store", of=store.app)
_command("export", store.export, "lorasrv store export backup.tar", of=store.app)
_command("import", store.import_, "lorasrv store import backup.tar --store ./new", of=store.app)
_command(
    "create",
    keys.create,
    "lorasrv key create --name alice --adapters 'alice-*' --rpm 60",
    "lorasrv key create --scope admin --expires-in 30d --json",
    of=keys.app,
)
_command("list", keys.list_keys, "lorasrv key list", of=keys.app)
_command("rotate", keys.rotate, "lorasrv key rotate alice", "lorasrv key rotate alice --grace 24h --json", of=keys.app)
_command("revoke", keys.revoke, "lorasrv key revoke alice", of=keys.app)
_command(
    "show",
    config.show,
    "lorasrv config show --origin",
    "lorasrv config show --origin -- --port 9000 --pool-bytes 2GiB",
    of=config.app,
)
_command(
    "init",
    config.init,
    "mkdir -p ~/.config/lorasrv && lorasrv config init > ~/.config/lorasrv/config.toml",
    of=config.app,
)
_command("detect", watermark.detect_watermark, "lorasrv watermark detect --text answer.txt", of=watermark.app)
for _name, _inner in (("store", store.app), ("key", keys.app), ("config", config.app), ("watermark", watermark.app)):
    app.add_typer(_inner, name=_name, cls=_Group)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve one base model with many LoRA adapters, every request in one batch."""
    ctx.default_map = ServerDefaults()


class _Unread:
    """Wrap a stream whose reader may have left or whose disk may be full, so that a command continues without showing
    its progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_what_is_closed() -> None:
    """Replace standard streams that the caller has closed, which are None in Python, by the null device."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def run() -> NoReturn:
    """Run the command; an error becomes one clear line and an exit code."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The terminal's encoding may lack a character of an answer.
            stream.reconfigure(errors="replace")
    sys.stderr = _Unread(sys.stderr)
    try:
        code = _run()
        sys.stdout.flush()
    except (_PipeClosed, BrokenPipeError):
        # Python would report the error again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.DONE
    sys.exit(code)


def _run() -> int:
    try:
        # The result is the code of typer.Exit, or the command's return value, None.
        return app(args=rewritten(sys.argv[1:]), prog_name="lorasrv", standalone_mode=False) or ExitCode.DONE
    except CliError as error:
        return _say(str(error), error.details, error.code)
    except AdapterInvalid as error:
        return _say("the adapter is refused", [_problem(p.field, p.message, p.code) for p in error.problems])
    except ConfigError as error:
        return _say(str(error), code=ExitCode.USAGE)
    except (LorasrvError, AdapterError) as error:
        return _say(str(error))
    except (_Interrupted, KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except (_PipeClosed, BrokenPipeError):
        raise
    except SystemExit as left:
        # Rich raises this when the reader of a help text has closed the pipe.
        if isinstance(left.__context__, BrokenPipeError):
            raise _PipeClosed from None
        raise
    except _UsageError as error:
        return _wrong_usage(error)
    except OSError as error:
        return _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:
        if os.environ.get("LORASRV_TRACEBACK"):
            raise
        return _say(
            f"unexpected {type(error).__name__}: {error}", ["LORASRV_TRACEBACK=1 shows where; please report it"]
        )


def _wrong_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # typer put the help into the message, or prints it itself
        return ExitCode.USAGE
    context = error.ctx
    error.message = _in_plain_words(error)
    message = _of_its_source(error.format_message(), error)
    if context is not None and hasattr(error, "possibilities"):
        message = _with_option_meant(error.message, error.option_name, context)
    stop = "" if message.endswith((".", "?")) else "."
    usage = _usage(error) if context is not None else ""
    command = context.command_path if context is not None else "lorasrv"
    return _say(f"{message[0].lower()}{message[1:]}{stop}{usage} See: {command} --help", code=ExitCode.USAGE)


def _of_its_source(message: str, error: Any) -> str:
    """Remove the environment variable from a message about an option that was given by its flag."""
    concerned: Any = getattr(error, "param", None)
    variable = getattr(concerned, "envvar", None)
    source = error.ctx.get_parameter_source(concerned.name) if variable and error.ctx is not None else None
    is_flag = source is not None and source.name == "COMMANDLINE"
    return message.replace(f" (env var: '{variable}')", "") if is_flag else message


def _in_plain_words(error: Any) -> Any:
    """Return the message of an error in the arguments, rewording pydantic's, which typer uses to check numbers."""
    cause = error.__cause__
    if not hasattr(cause, "errors"):
        return error.message
    from api.problem_texts import problem_text

    problem = cause.errors()[0]
    text = problem_text(problem)
    return error.message if text in problem["msg"] else f"{text}, not {problem['input']!r}"


def _with_meant(message: str, names: list[str]) -> str:
    return f"{message}. Did you mean {' or '.join(names)}?" if names else message


def _with_option_meant(message: str, flag: str, context: Any) -> str:
    """Add to a message the equivalent of another server's option, the options that may be meant, or else the commands
    that have this option."""
    if context.info_name in OF_SERVERS and flag in ELSEWHERE:
        return f"{message}. {ELSEWHERE[flag]}"
    if names := meant(flag, options_of(context)):
        return _with_meant(message, names)
    owners = owners_of(flag, context.find_root().command)
    return f"{message}. It is an option of {' and of '.join(owners)}" if owners else message


def _usage(error: Any) -> str:
    """Return the command's usage if the error is in a positional argument, else ""."""
    concerned = getattr(error, "param", None)
    pieces = [re.sub("[{}]", "", piece) for piece in error.ctx.command.collect_usage_pieces(error.ctx)]
    is_of_arguments = concerned is None or concerned.param_type_name == "argument"
    if not is_of_arguments or hasattr(error, "option_name") or hasattr(error.ctx.command, "commands"):
        return ""
    return f" Usage: {' '.join([error.ctx.command_path, *pieces])}."


def _problem(field: str, message: str, code: str) -> str:
    return f"{field + ': ' if field else ''}{message} ({code})"


def _say(message: str, details: list[str] | None = None, code: ExitCode = ExitCode.REFUSED) -> int:
    with contextlib.suppress(BrokenPipeError):
        note(f"lorasrv: {message}")
        for line in details or []:
            note(f"  {line}")
    return code
