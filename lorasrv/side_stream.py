"""A second stream of a GPU, for work of a step that can run beside the main one; works inside a captured graph too.

Memory that is made in it is given back to it, and its next work waits for all that the main stream was given before,
so nothing is overwritten that is still read.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """`with beside(): ...` starts after what the main stream has been given; `join` makes that wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
