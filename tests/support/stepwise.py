"""A live engine whose steps, costs and clock a test holds in its hands, so that nothing depends on how fast it runs."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clock import Clock

from adapter_store.store import AdapterStore
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.output_processor import RequestStream
from lorasrv.outputs import RequestOutput
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import SchedulerOutput
from lorasrv.worker.model_runner import ModelRunner, ModelRunnerOutput

PATIENCE_S = 30.0


class Gate:
    """Stands before the model: notes every step, and while it is shut lets only those pass that are allowed to."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps: list[SchedulerOutput] = []
        self._run = runner.run
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._is_held = False
        runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.scheduled:
            with self._changed:
                self._is_held = True
                assert self._changed.wait_for(self._may_pass, PATIENCE_S), "nobody let the engine go on"
                self._is_held = False
                if self._allowed is not None:
                    self._allowed -= 1
                self.steps.append(step)
        return self._run(step)

    def shut(self) -> None:
        self._let(0)

    def open(self) -> None:
        self._let(None)

    async def held(self) -> None:
        """Until a step is planned and waits."""
        await until(lambda: self._is_held and not self._may_pass())

    async def pass_on(self, count: int = 1) -> None:
        """Let so many steps pass, until one more is planned and waits."""
        end = len(self.steps) + count
        self._let(count)
        await until(lambda: len(self.steps) == end and self._is_held)

    def named(self, since: int = 0) -> list[list[str]]:
        """Whose tokens were in each step."""
        return [[name_of(share.request_id) for share in step.scheduled] for step in self.steps[since:]]

    def _may_pass(self) -> bool:
        return self._allowed is None or self._allowed > 0

    def _let(self, count: int | None) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()


@dataclass
class World:
    """What a scenario is about. Requests are called by their label; the adapter's account is `who`."""

    engine: AsyncEngine
    gate: Gate
    clock: Clock
    store: AdapterStore
    streams: dict[str, RequestStream] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.engine._engine._scheduler

    async def add(
        self, label: str, prompt: Sequence[int], tokens: int, adapter: str | None = None, who: str = "", **options: Any
    ) -> RequestStream:
        """Queue a request; it is in the engine's inbox when this returns."""
        key = self.store.resolve(adapter).key if adapter is not None else None
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        options |= {"adapter": key, "adapter_id": who or adapter or ""}
        self.streams[label] = await self.engine.add(prompt, sampling, request_id=label, **options)
        return self.streams[label]

    async def hold(self) -> None:
        """Shut the gate, with a request before it that is over with this step: what is added next is seen together."""
        self.gate.shut()
        await self.add("opener", [5, 6, 7], 1)
        await self.gate.held()

    async def warm(self, *names: str) -> None:
        for name in names:
            await self.engine.warm(self.store.resolve(name).key, PATIENCE_S)

    async def tokens(self, label: str) -> list[int]:
        return [token for output in await collect(self.streams[label]) for token in output.token_ids]

    def request(self, label: str) -> Any:
        """As the scheduler has it; only while the engine is held."""
        return next(r for r in self.scheduler.requests() if name_of(r.request_id) == label)


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def name_of(request_id: str) -> str:
    """The label that it was asked under."""
    return request_id.partition("#")[0]
