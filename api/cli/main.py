"""Start the `lorasrv` command. The effect of signals is settled before any import that takes time."""

import signal
import sys
from typing import NoReturn

from api.early_stop import EXIT_CODES, end_at_signals

_SERVERS = frozenset({"serve", "registry"})


def main() -> NoReturn:
    """Run the command in `sys.argv`, and end the process with its exit code."""
    try:
        if _SERVERS.intersection(sys.argv[1:2]):
            end_at_signals()
        from api.cli.program import run
    except KeyboardInterrupt:
        sys.exit(EXIT_CODES[signal.SIGINT])
    run()
