"""Run a registry, which serves the store's routes to the servers that follow it, without an engine."""

from typing import TYPE_CHECKING

import typer

from api.cli.common.options import ConfigOption, JsonOption
from api.cli.common.settings_options import given_settings
from api.cli.common.terminal import CliError, print_json, progress_of_start, say
from lorasrv.errors import ConfigError

if TYPE_CHECKING:
    from api.server import Ready


def registry(ctx: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Keep adapters and keys for servers that follow this one (serve --registry URL), without answering prompts.

    Takes the options of serve. The base is needed to check adapters; only samples of its weights are read.
    """
    flags = given_settings(ctx)
    from api.config.sources import Sources
    from api.observability.logs import written
    from api.server import CannotListen, run

    sources = Sources.gather(flags, config)
    settings = sources.settings()
    try:
        settings.check_is_registry()
        with (
            written(settings.log_format, settings.log_level),
            progress_of_start(lambda ready: _print_ready(ready, as_json)) as (step, on_ready),
        ):
            run(settings, step, on_ready, computes=False)
    except ConfigError as error:
        raise type(error)(sources.reworded(str(error))) from None
    except CannotListen as error:
        raise CliError(str(error)) from None


def _print_ready(ready: "Ready", as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json({"event": "ready", **asdict(ready)})
        return
    say(f"ready: {ready.url}  registry of model {ready.model}  in {ready.seconds:.1f} s")
    say(f"follow it: lorasrv serve --registry {ready.url} --store FOLDER")
