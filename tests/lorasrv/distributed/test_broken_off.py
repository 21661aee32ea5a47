"""Exchanges of frames that do not come to their end: no reply is taken for that of another question."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from partitions import SHORT, ranks, replica
from peft_adapters import peft_adapter
from tiny_engine import LONG

from lorasrv.distributed import frames
from lorasrv.distributed.frames import Frame, Link
from lorasrv.distributed.pulse import PulseMonitor
from lorasrv.distributed.rank_links import DONE, RankLinks, RankSockets
from lorasrv.distributed.rank_worker import READ
from lorasrv.errors import EngineDead, OutOfMemory
from lorasrv.llm import LLM

LARGE = 1000
"""Bytes for which there is no memory."""


@pytest.fixture
def llm(model: Path, tmp_path: Path) -> Iterator[LLM]:
    """A replica of three ranks with the adapters a and b."""
    with replica(model, ranks("0;1;2")) as built:
        for seed, name in enumerate("ab"):
            peft_adapter(model, tmp_path / name, seed=seed, r=4)
            built.add_adapter(name, tmp_path / name)
        yield built


@contextmanager
def short_memory(thread: str) -> Iterator[None]:
    """The first large frame that a thread receives in this block finds no memory."""
    had: list[int] = []

    def allocate(length: int) -> bytearray:
        if length > LARGE and threading.current_thread().name == thread and not had:
            had.append(length)
            raise MemoryError
        return bytearray(length)

    with patch.object(frames, "bytearray", allocate, create=True):
        yield
    assert had


def test_a_reply_for_which_there_is_no_memory(llm: LLM) -> None:
    """A snapshot is not kept then; other pages are read afterwards, and steps computed."""
    llm.generate([LONG], SHORT)
    read = llm.engine._executor.read_pages
    pages = [read((page,)) for page in (1, 2)]
    with short_memory(threading.current_thread().name), pytest.raises(MemoryError, match="rank 1"):
        read((1,))
    assert not torch.equal(*pages)
    assert all(torch.equal(read((page,)), rows) for page, rows in zip((1, 2), pages, strict=True))
    assert llm.generate([LONG], SHORT)[0].token_ids


def test_an_adapter_for_whose_matrices_a_rank_has_no_memory(llm: LLM) -> None:
    """Its requests end with an error, and may come again."""
    with short_memory("rank-2-bulk"), pytest.raises(OutOfMemory):
        llm.generate([LONG], SHORT, ["a"])
    llm.engine.check_integrity()
    assert llm.generate([LONG], SHORT, ["a"])[0].token_ids


def interrupted(call: Callable[[], object]) -> None:
    """Press Ctrl-C twice; this thread waits for a reply then."""
    receive, own = Link.receive, threading.current_thread()

    def stopped(link: Link) -> Frame:
        if threading.current_thread() is own:
            raise KeyboardInterrupt
        return receive(link)

    with patch.object(Link, "receive", stopped), pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.parametrize("adapter", ["a", "b"])
def test_a_wait_that_is_interrupted_ends_the_ranks(adapter: str, llm: LLM) -> None:
    """What waits in the links then would be taken for later replies: an adapter would seem to be there that is not."""
    interrupted(lambda: llm.generate([LONG], SHORT, ["a"]))
    with pytest.raises(EngineDead, match="Ctrl-C"):
        llm.generate([LONG], SHORT, [adapter])


def test_no_rank_is_asked_what_cannot_be_sent_to_all() -> None:
    """The rank that was asked would reply to the next question, too."""
    with ExitStack() as opened:
        pairs = [RankSockets.pair() for _ in range(2)]
        for one in (one for pair in pairs for one in pair):
            opened.callback(one.close)
        links = RankLinks([own for own, _ in pairs], PulseMonitor({}, lambda: None), lambda: None)
        unsent = Frame(READ, {"what": 1}, [np.zeros(1, dtype=np.complex64)])
        with pytest.raises(AssertionError, match="cannot carry"), links.asking_bulk([Frame(READ, {"what": 1}), unsent]):
            pass
        assert not links.is_broken_off
        with links.asking_bulk([Frame(READ, {"what": 2})] * 2):
            for _, other in pairs:
                assert Link(other.bulk).receive().fields["what"] == 2
                Link(other.bulk).send(Frame(DONE))
