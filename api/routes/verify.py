"""Serve POST /v1/adapters/{id}:verify, which compares an adapter's outputs on this server with PEFT's."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterError, AdapterNotFound
from adapter_store.spec import AdapterKey, AdapterRef
from api.asgi.json_body import JsonRoute
from api.asgi.sse import DONE, EventStream, event, run_until_disconnect
from api.auth.principal import Scope
from api.errors import ApiError, describe
from api.schemas.adapters import VerifyBody
from api.serving.services import Services, ServicesDep, ViewDep
from lorasrv.errors import InvalidRequest, LorasrvError
from lorasrv.offline.verify.job import BUILTIN_PROMPTS, MAX_PROMPT_TOKENS, NEW_TOKENS, Progress, VerifyJob
from lorasrv.offline.verify.verifier import check_memory, needed_bytes

Verify = Callable[[Callable[[Progress], None]], Coroutine[Any, Any, dict[str, Any]]]
_LOG = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/adapters/{reference}:verify")
async def verify_adapter(
    reference: str, body: VerifyBody, request: Request, services: ServicesDep, view: ViewDep
) -> Response:
    """Verify an adapter in a separate process, which ends with the request; store the verdict with the version."""
    # Check before computing for minutes: a server that does not own the registry cannot store the verdict.
    services.registry.check_is_owner()
    if body.ignore_memory and not view.caller.may(Scope.ADMIN):
        # If memory runs out, the server goes down for all clients.
        raise ApiError(403, "ignore_memory needs a key of scope admin", code="forbidden", param="ignore_memory")
    services.verifier.check_ready(view.sees)
    ref, key = await run_in_threadpool(view.resolve_weights, reference)
    # Held until the response is complete, because the other process reads the stored file.
    hold = await run_in_threadpool(services.store.hold, key)
    job = await run_in_threadpool(_make_job, services, ref, key, body)

    async def verify(on_progress: Callable[[Progress], None]) -> dict[str, Any]:
        name = f"{ref.adapter_id}@{ref.version}"
        figures = await services.verifier.run(name, job, body.timeout_s, on_progress, view.sees)
        verdict = {
            "object": "adapter.verdict",
            "id": ref.adapter_id,
            "version": ref.version,
            "digest": f"sha256:{hold.key}",
            "created": int(time.time()),
            **figures,
        }
        # If the version was deleted meanwhile, the verdict is not stored, but the caller still gets it.
        with contextlib.suppress(AdapterNotFound):
            await run_in_threadpool(services.store.version_history.record_verdict, ref, verdict)
        return verdict

    if body.stream:
        stream = _VerifyStream(verify)
        return EventStream(stream.events(), stream.close, {})
    return JSONResponse(await run_until_disconnect(request.receive, verify(lambda _: None)))


def _make_job(services: Services, ref: AdapterRef, key: AdapterKey, body: VerifyBody) -> VerifyJob:
    """Build the job. Call in a thread: it reads the disk and tokenizes."""
    config, store = services.settings.engine_config(), services.store
    # Read all weights, so that damaged ones are refused as on other routes and not reported as a failed verification.
    peft, spec = store.version_history.peft_dir(ref), store.load(key).spec
    if spec.vocab_size:
        why = f"{ref.adapter_id}@{ref.version} has {spec.vocab_size} tokens, and the base has others to compare it with"
        raise InvalidRequest(f"{why}: adapters with a vocabulary of their own are not verified", param="id")
    if not body.ignore_memory:
        weight_bytes = services.engine.metrics.stats().weight_bytes
        check_memory(needed_bytes(services.engine.spec, weight_bytes, spec.weights_bytes))
    # The other process uses no GPU: it computes on the CPU even if the server computes on a GPU.
    kernels = "auto" if config.model.kernels == "triton" else config.model.kernels
    new_tokens = min(NEW_TOKENS, services.engine.max_model_len // 2)
    return VerifyJob(
        model=replace(config.model, device="cpu", kernels=kernels),
        kv_dtype=config.memory.kv_cache_dtype,
        max_lora_rank=store.max_lora_rank,
        key=key,
        config=peft.config,
        weights=peft.weights_path.absolute(),
        weights_digest=spec.weights_digest,
        stored=spec.stored,
        prompts=_prompts(services, body, min(MAX_PROMPT_TOKENS, services.engine.max_model_len - new_tokens)),
        new_tokens=new_tokens,
    )


def _prompts(services: Services, body: VerifyBody, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the prompts, rendered with the chat template if there is one.

    Built-in prompts are cut to `max_tokens`.

    Raises:
        InvalidRequest: a prompt of the body is empty or longer.
    """
    if body.prompts is None:
        return tuple(tuple(_encode(services, text)[:max_tokens]) for text in BUILTIN_PROMPTS)
    prompts = []
    for i, text in enumerate(body.prompts):
        ids = _encode(services, text)
        if not 0 < len(ids) <= max_tokens:
            raise InvalidRequest(
                f"prompts[{i}] has {len(ids)} tokens; 1 to {max_tokens} can be compared", param=f"prompts[{i}]"
            )
        prompts.append(tuple(ids))
    return tuple(prompts)


def _encode(services: Services, text: str) -> list[int]:
    template, tokenizer = services.engine.chat_template, services.engine.tokenizer
    if template is None:
        return tokenizer.encode(text)
    return template.encode([{"role": "user", "content": text}], tokenizer)


class _VerifyStream:
    """Stream a verification as events: progress, and at the end the verdict or the error."""

    def __init__(self, verify: Verify) -> None:
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._task = asyncio.create_task(verify(self._progress.put_nowait))
        self._task.add_done_callback(lambda _: self._progress.put_nowait(None))

    async def events(self) -> AsyncGenerator[bytes, None]:
        while (progress := await self._progress.get()) is not None:
            yield event({"progress": [progress.what, progress.done]})
        yield event(self._result())
        yield DONE

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _result(self) -> dict[str, Any]:
        try:
            return self._task.result()
        except Exception as error:
            if not isinstance(error, LorasrvError | AdapterError):
                _LOG.exception("verifying failed")
            return describe(error).body
