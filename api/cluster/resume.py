"""Copy an event stream in whole events, and remember its tokens, so that another replica can continue it.

A replica that is asked with the cluster's secret writes a comment after the events of each output, `: tokens 17 4`.
A header of its answer holds what else the next replica must know (`api/serving/resumption.py`). Events are passed on
only once such a comment follows them, and without the comment: the client's text therefore always matches the
remembered tokens. A draining replica adds the comment `: draining`; if its engine ends, it writes `: stopping` before
the event that reports the error. There are no other comments. Only events are passed on, so the next replica, or the
edge if there is none, can continue their numbering.
"""

import json
import re
from array import array

from api.cluster.upstream import Broken

RESUME = b"x-lorasrv-resume"
"""Sent to a replica: the number of bytes before the body that hold the state to resume from; 0: a new answer.
Sent by a replica: what to tell the next replica."""
CLUSTER = b"x-lorasrv-cluster"
"""The cluster's secret; without it, a replica refuses an edge's other headers."""
_END = b"\n\n"
_MARK = re.compile(rb": (?:tokens ([0-9 ]+)|(draining|stopping))\n\n")


class EventStreamCopy:
    """Follow one client's stream across the replicas that write it.

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
        """Return whether another replica can continue the stream."""
        return bool(self._offer)

    @property
    def should_move(self) -> bool:
        """Return whether its replica drains and another could continue the stream."""
        return self.is_draining and self.may_resume

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens passed on, as far as comments told them."""
        return len(self._tokens)

    @property
    def num_events(self) -> int:
        """Return the number of events passed on."""
        return self._num_events

    def push(self, piece: bytes) -> bytes:
        """Take a piece that has arrived, and return what may be sent to the client."""
        held = self._held + piece if self._held else piece
        ready = self._marked(held) if self._offer else self._whole(held)
        self._num_events += ready.count(_END)
        return ready

    def end(self) -> bytes:
        """Return the rest of a stream that has ended.

        Raises:
            Broken: the stream is incomplete: an event is cut, or the replica stops and another can continue.
        """
        rest, self._held = self._held, b""
        if rest and not rest.endswith(_END):
            raise Broken("the stream ends within an event")
        if self._has_stopped:
            raise Broken("the replica stops")
        return rest

    def begin_anew(self) -> None:
        """Follow another replica from here on, and drop events that no comment followed."""
        self._held = b""
        self.is_draining = self._has_stopped = False

    def state(self) -> bytes:
        """Return the state that the next replica resumes from, as JSON."""
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
