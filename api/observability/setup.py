"""Assemble all observers of a server: metrics, log lines, spans, the ledger."""

import asyncio
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from api.observability.access_log import request_logger
from api.observability.access_middleware import AccessMiddleware, Sink
from api.observability.metrics.registry import make_registry
from api.observability.metrics.requests import HttpFigures
from api.observability.metrics.resident_adapters import ResidentAdapters
from api.observability.tracing import Tracing, open_tracing
from api.serving.services import Services
from lorasrv.metrics.usage_ledger import Ledger


@dataclass(slots=True)
class Observability:
    """Hold the observers of one server."""

    registry: CollectorRegistry
    # Call its `look` before metrics are collected; None: vLLM's names are not wanted.
    residents: ResidentAdapters | None
    # Wraps all other middleware.
    middleware: Middleware
    _ledger: Ledger
    _tracing: Tracing | None
    _writing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, services: Services) -> "Observability":
        """Build the observers from the settings.

        Raises:
            ConfigError: spans are configured, and the packages for them are not installed.
        """
        settings, http = services.settings, HttpFigures()
        tracing = open_tracing(settings.otlp_traces_endpoint)
        sinks: list[Sink] = [http.on_response_ended, request_logger(settings.log_prompts)]
        if tracing is not None:
            sinks.append(tracing.on_response_ended)
        middleware = Middleware(AccessMiddleware, sinks=sinks, keeps_text=settings.log_prompts)
        residents = ResidentAdapters(services.engine, services.store) if settings.metrics_compat == "vllm" else None
        return cls(make_registry(services, http, residents), residents, middleware, services.ledger, tracing)

    def start(self) -> None:
        """Start writing the ledger."""
        self._writing = asyncio.create_task(self._ledger.run())

    async def close(self) -> None:
        """Write and send what is left, after the engine has ended."""
        if self._writing is not None:
            self._writing.cancel()
        await self._ledger.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
