"""Copy a stream of events in whole events, and remember the tokens in it, so that another replica can go on.

A replica that is asked with the cluster's secret writes a comment behind the events of each output, `: tokens 17 4`,
and what else the other must know into a header of its answer (`api/serving/resumption.py`). Only what such a comment
follows is passed on, without the comment: so what the client has is always what these tokens say. While it drains, a
comment `: draining` follows; where its engine ends, `: stopping` comes before the event that says so. There are no
other comments, so what is passed on is events alone: the next replica, or the edge where there is none, numbers its own
behind them.
"""

import json
import re
from array import array

from api.cluster.upstream import Broken

RESUME = b"x-lorasrv-resume"
"""To a replica: how many bytes before the body say where to go on; 0 begins. From it: what to tell the next."""
CLUSTER = b"x-lorasrv-cluster"
"""The cluster's secret, without which a replica refuses the other headers of an edge."""
_END = b"\n\n"
_MARK = re.compile(rb": (?:tokens ([0-9 ]+)|(draining|stopping))\n\n")


class EventStreamCopy:
    """Follow one client's stream over the replicas that write it.

    Args:
        offer: value of the first replica's header, empty if the answer cannot be resumed.
    """

    def __init__(self, offer: bytes) -> None:
        self._offer = offer
        self._tokens = array("I")
        self._num_events = 0
        self._held = b""
        self.is_draining = self._has_stopped = False

    @property
    def may_resume(self) -> bool:
        """Return whether another replica can go on."""
        return bool(self._offer)

    @property
    def should_move(self) -> bool:
        """Return whether its replica drains and another could go on."""
        return self.is_draining and self.may_resume

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were passed on, as far as they are known."""
        return len(self._tokens)

    @property
    def num_events(self) -> int:
        """Return how many events were passed on."""
        return self._num_events

    def push(self, piece: bytes) -> bytes:
        """Take what has arrived, and return what may go on to the client."""
        held = self._held + piece if self._held else piece
        ready = self._marked(held) if self._offer else self._whole(held)
        self._num_events += ready.count(_END)
        return ready

    def end(self) -> bytes:
        """Return the rest of a stream that has ended.

        Raises:
            Broken: it is no end: an event is cut, or the replica stops and another can go on.
        """
        rest, self._held = self._held, b""
        if rest and not rest.endswith(_END):
            raise Broken("the stream ends within an event")
        if self._has_stopped:
            raise Broken("the replica stops")
        return rest

    def begin_anew(self) -> None:
        """Follow another replica from here on: forget what no comment followed."""
        self._held = b""
        self.is_draining = self._has_stopped = False

    def state(self) -> bytes:
        """Return what the next replica must know."""
        progress = {"token_ids": self._tokens.tolist(), "num_events": self._num_events}
        return json.dumps({**json.loads(self._offer), **progress}).encode()

    def _whole(self, held: bytes) -> bytes:
        end = held.rfind(_END) + len(_END)
        if end < len(_END):
            self._held = held
            return b""
        self._held = held[end:]
        return held[:end] if self._held else held

    def _marked(self, held: bytes) -> bytes:
        pieces: list[bytes] = []
        begin = 0
        for mark in _MARK.finditer(held):
            if mark[1] is not None:
                pieces.append(held[begin : mark.start()])
                self._tokens.extend(map(int, mark[1].split()))
            elif mark[2] == b"draining":
                self.is_draining = True
            else:
                self._has_stopped = True
            begin = mark.end()
        self._held = held[begin:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
