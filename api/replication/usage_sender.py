"""Send the usage that this server has counted to the registry: each batch of the ledger until the registry has it."""

import asyncio
import contextlib
import logging
import sqlite3

from adapter_store.errors import AdapterError, OriginRefused
from api.replication.headers import USAGE
from api.replication.registry_client import ANSWER_S, CONNECT_S, RegistryClient
from lorasrv.metrics.usage_batch import UsageBatch
from lorasrv.metrics.usage_ledger import Ledger

_LOG = logging.getLogger(__name__)
TRY_AGAIN_S = 5.0
_FAILURES = (AdapterError, sqlite3.Error, OSError)


class UsageSender:
    """Send a ledger's batches in order, one at a time. For the event loop's thread.

    A batch whose answer was lost is sent again with the same number, and the registry counts it once. A refused batch
    waits until a later one is counted, and is then set aside. If the registry refuses every batch, as an older version
    may, all are sent again until it counts them.
    """

    def __init__(self, ledger: Ledger, client: RegistryClient) -> None:
        self._ledger, self._client = ledger, client
        self._sending: asyncio.Task[None] | None = None
        self._is_failing = False

    def start(self) -> None:
        """Begin to send, including batches left by an earlier process."""
        self._sending = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what is left if the registry answers soon; the next server that starts on this folder sends the rest."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        with contextlib.suppress(*_FAILURES):
            await self._send(CONNECT_S)

    async def _run(self) -> None:
        while True:
            await self._ledger.written.wait()
            self._ledger.written.clear()
            try:
                await self._send(ANSWER_S)
                self._is_failing = False
            except _FAILURES as error:
                if not self._is_failing:
                    self._is_failing = True
                    _LOG.warning("usage waits in the ledger until the registry takes it: %s", error)
                await asyncio.sleep(TRY_AGAIN_S)
                self._ledger.written.set()

    async def _send(self, timeout_s: float) -> None:
        refused: tuple[UsageBatch, OriginRefused] | None = None
        while (batch := await self._ledger.next_batch(refused and refused[0])) is not None:
            try:
                await self._client.post(USAGE, batch.to_dict(), timeout_s)
            except OriginRefused as error:
                if refused is not None:
                    raise
                refused = batch, error
                continue
            await self._ledger.on_batch_counted(batch)
            if refused is not None:
                await self._ledger.on_batch_refused(refused[0], str(refused[1]))
                _LOG.error("the registry will never count a batch of usage, which is set aside: %s", refused[1])
                refused = None
        if refused is not None:
            raise refused[1]
