"""Whether the store's disk takes uploads, asked in a thread of its own: a disk on the network may never answer, and
whoever asks whether the server is ready must hold up nobody."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from adapter_store.store import AdapterStore

PATIENCE_S = 2.0


class StoreProbe:
    """For the event loop's thread."""

    def __init__(self, store: AdapterStore, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "lorasrv-store-probe")

    async def is_writable(self) -> bool:
        """False also if the disk does not say so in time."""
        asked = asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._store.is_writable)
        try:
            return await asyncio.wait_for(asked, self._patience_s)
        except TimeoutError:
            return False
