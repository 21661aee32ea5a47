"""Engine thread: runs the steps of an engine core; the event loop sends it messages and receives its outputs."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from lorasrv.engine.core import EngineCore
from lorasrv.engine.messages import (
    AddRequests,
    EndRequest,
    Message,
    Shutdown,
    UtilityCall,
    UtilityResult,
    Wake,
)
from lorasrv.errors import EngineDead
from lorasrv.outputs import EngineOutput
from lorasrv.worker.device import compute_in_parallel

_LOG = logging.getLogger(__name__)
MAX_SLEEP_S = 3600.0
"""Longest timeout for a queue, which does not accept an infinite one."""
MAX_WAIT_S = 1.0
"""Longest sleep while requests wait: a missed wake-up delays them by no more."""


class EngineThread:
    """Drain the inbox, run a step, and deliver all its outputs in one call, at once or when the next step begins to
    compute.

    Args:
        deliver: called in the event loop with the outputs and results since its last call.
        on_death: called in the event loop with the reason if the core cannot go on.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: queue.SimpleQueue[Message],
        deliver: Callable[[list[EngineOutput], list[UtilityResult]], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._core, self._inbox = core, inbox
        self._deliver, self._on_death = deliver, on_death
        # Outputs that are not delivered to the event loop yet.
        self._unposted: list[EngineOutput] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_bound: asyncio.Event | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether steps are computed."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start; outputs go to the running event loop."""
        self._loop, self._is_bound = asyncio.get_running_loop(), asyncio.Event()
        self._thread.start()

    async def bound(self) -> None:
        """Wait until steps can be computed, or never will."""
        assert self._is_bound is not None
        await self._is_bound.wait()

    def stop(self) -> None:
        """Stop after the messages sent so far."""
        self._inbox.put(Shutdown())

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def take_unposted(self) -> list[EngineOutput]:
        """Return the undelivered outputs. Call it when all streams end: a thread that still runs may deliver some of
        them again."""
        outputs, self._unposted = self._unposted, []
        return outputs

    def _run(self) -> None:
        core = self._core
        try:
            core.heartbeat.beat()
            compute_in_parallel()
            core.bind_thread(self._post)
            self._tell_bound()
            core.compute_first_step()
            idle = True
            while self._drain_inbox(wait=idle):
                # `step` calls `_post` for the outputs of the previous step.
                outputs = core.step()
                self._unposted += outputs
                idle = not core.made_progress
                goes_on = core.has_requests and all(output.finish_reason is None for output in outputs)
                if idle or core.is_computing or not goes_on:
                    self._post()
                core.compute()
        except EngineDead as error:
            self._report_death(str(error))
        except Exception as error:
            _LOG.exception("the engine thread died")
            self._report_death(f"the engine died: {type(error).__name__}")

    def _report_death(self, why: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_death, why)
        self._tell_bound()

    def _tell_bound(self) -> None:
        assert self._loop is not None
        assert self._is_bound is not None
        # A start may be given up meanwhile.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._is_bound.set)

    def _drain_inbox(self, *, wait: bool) -> bool:
        """Handle every message; return False on shutdown.

        Args:
            wait: wait for the first message, at most until the engine has other work. Before waiting, memory is
                committed for pages that will be used soon, a few at a time.
        """
        while wait or not self._inbox.empty():
            if wait:
                if self._inbox.empty() and self._core.commit_ahead():
                    return True
                self._core.heartbeat.rest()
            try:
                most_s = MAX_WAIT_S if self._core.has_requests else MAX_SLEEP_S
                message = self._inbox.get(timeout=min(self._core.idle_s, most_s) if wait else None)
            except queue.Empty:
                return True
            finally:
                self._core.heartbeat.beat()
            wait = False
            if not self._act_on(message):
                return False
        return True

    def _act_on(self, message: Message) -> bool:
        """Handle a message; return False on shutdown."""
        match message:
            case AddRequests():
                for added in message.messages:
                    self._core.add_request(added)
            case UtilityCall():
                if message.request is None:
                    self._core.cancel_utility_call(message.number)
                else:
                    self._core.call_utility(message.number, message.request)
            case EndRequest():
                (self._core.stop if message.stopped else self._core.abort)(message.request_id)
                # Delivered when the next step begins to compute: what the request held is free now.
                self._unposted += self._core.take_outputs()
            case Shutdown():
                return False
            case Wake():
                pass
        return True

    def _post(self) -> None:
        """Deliver pending outputs and results to the event loop.

        If no step is in flight and no answer ends, outputs are delivered once the next step computes. This thread does
        not need the GIL then; earlier, both threads would wait for it in turn.
        """
        results = self._core.take_utility_results()
        assert self._loop is not None
        if (self._unposted or results) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, self._unposted, results)
            self._unposted = []
