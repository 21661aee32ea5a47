"""Tell an edge how another replica can go on with a stream, and go on with one.

The tokens of an answer depend on its request and on the engine. Both replicas derive the same digest of that, or the
second refuses. A stream whose tokens depend on more, or that says more of them than their text, is not offered.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from api.asgi.resumption import RESUME, Resumption
from api.errors import ApiError, cause_of
from api.serving.admission import AddPrompt, Prompt
from lorasrv.engine.poison_requests import fingerprint
from lorasrv.request import EngineCoreRequest, OnCold
from lorasrv.speculation_params import REJECTION
from lorasrv.text.structured_output.grammar import Grammar

if TYPE_CHECKING:
    from lorasrv.engine.request_stream import RequestStream


def seeded(resumption: Resumption) -> dict[str, Any]:
    """Return the fields of a resumed request that the first replica has chosen."""
    chosen: dict[str, Any] = {"on_cold": OnCold.WAIT}
    return chosen if resumption.seed is None else {**chosen, "seed": resumption.seed}


class StreamResumption:
    """Follow one request that an edge may have to resume, or resumes.

    Args:
        engine: fingerprint of the engine.
        is_resumable: whether a stream of this request can be.
        grammar: what its text must follow.
    """

    def __init__(self, asked: Resumption, engine: str, is_resumable: bool, grammar: Grammar | None) -> None:
        self._asked = asked
        self._grammar = grammar
        self._engine = engine if is_resumable else ""
        self._accepted: EngineCoreRequest | None = None
        self._digest = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the first tokens of the answer, which another replica has generated.

        Raises:
            ApiError: 409, this request cannot be resumed.
        """
        if not self._asked.goes_on:
            return ()
        if not self._engine:
            raise _refused()
        return self._asked.token_ids

    def watched(self, add: AddPrompt) -> AddPrompt:
        """Return a function that adds a prompt and takes note of what the engine makes of it."""

        async def add_watched(prompt: Prompt) -> "Sequence[RequestStream]":
            streams = await add(prompt)
            await self._accept(streams)
            return streams

        return add_watched

    @property
    def is_offered(self) -> bool:
        """Return whether another replica can go on."""
        return bool(self._digest)

    def offer(self, answer_id: str, created_s: int, versions: Mapping[str, str]) -> dict[str, str]:
        """Return the header that tells an edge how; `versions` are those that the request's references mean."""
        if self._accepted is None or not self._digest:
            return {}
        seed = self._accepted.sampling.seed
        chosen = {"seed": seed, "versions": dict(versions), "digest": self._digest}
        return {RESUME: json.dumps({"answer_id": answer_id, "created_s": created_s, **chosen})}

    async def _accept(self, streams: "Sequence[RequestStream]") -> None:
        """Raises: ApiError: 409, the tokens so far are not those that this replica would have generated."""
        if not self._engine:
            return
        self._accepted = streams[0].request
        self._digest = _digest(self._engine, self._accepted, self._grammar)
        if self._asked.goes_on and self._digest != self._asked.digest:
            refused = _refused()
            for stream in streams:
                await stream.aclose(cause_of(refused))
            raise refused


def _digest(engine: str, request: EngineCoreRequest, grammar: Grammar | None) -> str:
    """Return the name of all that the tokens of a request depend on; "" if that is more than can be named."""
    if request.kv_policy is not None or request.accept == REJECTION:
        return ""
    text = None if grammar is None else grammar.text
    shown = asdict(request.text) | {"shown_token_ids": sorted(request.text.shown_token_ids)}
    facts = engine, fingerprint(request).hex(), request.sampling.seed, shown, text
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _refused() -> ApiError:
    return ApiError(409, "this replica would not go on with the same tokens", code="not_resumable")
