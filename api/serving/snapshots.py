"""Make the snapshot of a version's fixed prompt when an operator asks for it."""

import asyncio

from adapter_store.spec import AdapterRef
from api.auth.principal import Caller
from api.serving.fixed_prefixes import PrefixTokens
from api.serving.services import Services
from lorasrv.engine.messages import SnapshotStatus
from lorasrv.errors import SnapshotFailure
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams

WRITE_S = 30.0
"""Longest wait until computed pages are on disk."""


async def kept_snapshot(services: Services, ref: AdapterRef, found: PrefixTokens, caller: Caller) -> SnapshotStatus:
    """Return the snapshot of a version's fixed prefix; compute and write it if there is none.

    Raises:
        SnapshotFailure: it cannot be kept.
        EngineOverloaded, LimitExceeded, LorasrvError, AdapterError: the prompt cannot be computed now.
    """
    engine, known = services.engine, (ref.key, found.prefix, found.token_ids)
    if (status := await engine.find_snapshot(*known)) is not None:
        return status

    await services.admission.check(caller)
    options = RequestOptions(
        principal=caller.principal, adapter_key=ref.key, adapter_id=ref.adapter_id, prefix=found.prefix
    )
    async for _ in engine.generate(list(found.token_ids), SamplingParams(max_tokens=1, temperature=0.0), options):
        pass
    try:
        async with asyncio.timeout(WRITE_S):
            return await engine.make_snapshot(*known)
    except TimeoutError:
        why = "the pages of the prompt were evicted before they were written, or the disk is slow; try again"
        raise SnapshotFailure(why) from None
