"""The process of a rank other than 0: `python -m lorasrv.distributed.rank_process ORDERS BULK PULSE`. The arguments are
file descriptors from rank 0, which alone starts this process.

The pulse begins before torch is imported, which takes seconds.
"""

import logging
import os
import signal
import socket
import sys
import threading

from lorasrv.distributed.pulse import EXIT_CODE, beat
from lorasrv.distributed.rank_links import RankSockets

_LOG = logging.getLogger(__name__)


def main() -> None:
    """Run the rank until rank 0 stops it or ends."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Rank 0 gets the same signals from a terminal or supervisor, and ends the ranks when its requests are done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sockets = RankSockets(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:4]))
    threading.Thread(target=beat, args=(sockets.pulse, lambda: os._exit(EXIT_CODE)), daemon=True).start()
    from lorasrv.distributed.rank_start import run_rank, torch_comm

    try:
        code = 0 if run_rank(sockets, torch_comm) else 1
    except Exception:
        _LOG.critical("this rank cannot go on", exc_info=True)
        code = EXIT_CODE
    sys.stderr.flush()
    # Threads of the transport may wait for other ranks.
    os._exit(code)


if __name__ == "__main__":
    main()
