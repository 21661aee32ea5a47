"""Compare the steps of two checkouts on a machine that others share.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_turns.py --versus ../other-checkout
    python tests/benchmarks/bench_turns.py --versus ../other-checkout --work 16/0,16/16,prompt:900 --turns 20

16/4 is a decode step of 16 rows over 4 adapters of rank 16, prompt:900 a prompt of 900 tokens for the base, both of
random tokens and without drafts. Each checkout has a process that stays; they take turns of some steps, or of one
prompt, and the ratio of each pair of turns counts. Where the machine's speed changes from one second to the next,
processes that run one after the other (`bench_step.py --versus`) differ by a fifth, and these by a twentieth.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import adapter_folders, arguments, compared, environment, revision, table
from served import ROOT

import lorasrv
from lorasrv.config import EngineConfig, SpeculationOptions
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation_params import NO_SPECULATION

STEPS = 8
"""Steps of a turn."""
KERNELS = "linear", "attention", "pointwise", "sgmv"
"""Parts of a step that are not the host's."""
PROMPT = "prompt:"


class Steps:
    """Run steps of one checkout's engine."""

    def __init__(self, llm: LLM, names: list[str]) -> None:
        self._llm, self._names = llm, names
        self._random = random.Random(0)
        self._number = 0

    def begin(self, work: str, turns: int) -> None:
        """Make everything ready for the turns of a kind of work."""
        if work.startswith(PROMPT):
            for _ in range(2):
                self.turn(work)
            return
        rows, adapters = map(int, work.split("/"))
        for i in range(rows):
            name = self._names[i % adapters] if adapters else None
            self._add(self._prompt(64), name, (1 + STEPS) * turns + rows + 8)
        # No step has prompts any more, then.
        for _ in range(rows + 2):
            self._llm.engine.step()

    def turn(self, work: str) -> dict[str, float]:
        """Return the milliseconds of a turn: a step and the host's part of it, or a prompt."""
        engine = self._llm.engine
        begun = time.perf_counter()
        if work.startswith(PROMPT):
            length = int(work.removeprefix(PROMPT))
            self._add(self._prompt(length), None, 1)
            self.end()
            return {"": 1e3 * (time.perf_counter() - begun)}
        # The step in flight has waited while the other checkout had its turn.
        engine.step()
        before, seconds, profile = engine.profile.seconds(), [], engine.profile
        # The other checkout may not plan steps ahead.
        gaps, gap_s = getattr(profile, "gaps", 0), getattr(profile, "gap_s", 0.0)
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        after = engine.profile.seconds()
        kernels = sum(after.get(kind, 0.0) - before.get(kind, 0.0) for kind in KERNELS)
        host_s = (sum(seconds) - kernels) / STEPS
        gaps = getattr(profile, "gaps", 0) - gaps
        between_s = (profile.gap_s - gap_s) / gaps if gaps else host_s
        return {"": 1e3 * statistics.median(seconds), ", host": 1e3 * host_s, ", between passes": 1e3 * between_s}

    def end(self) -> None:
        """Run what is left."""
        while self._llm.engine.has_requests:
            self._llm.engine.step()

    def _prompt(self, length: int) -> list[int]:
        """Return a prompt that shares no pages with others."""
        return [self._random.randrange(100, 40_000) for _ in range(length)]

    def _add(self, prompt: list[int], name: str | None, max_tokens: int) -> None:
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        key = self._llm.store.resolve(name).key if name else None
        request = RequestId(f"row{self._number}")
        self._llm.engine.add_request(
            self._llm.input_processor.process(
                request, prompt, sampling, RequestOptions(adapter_key=key, speculation=NO_SPECULATION)
            )
        )


def serve(adapters: int) -> None:
    """Run what the lines of standard input ask for, each a method of `Steps` and its arguments."""
    folders = adapter_folders(adapters)
    with LLM(config=EngineConfig(speculation=SpeculationOptions(speculation="off"))) as llm:
        for folder in folders:
            llm.add_adapter(folder.name, folder)
        steps = Steps(llm, [folder.name for folder in folders])
        print(json.dumps(lorasrv.__file__), flush=True)
        for line in sys.stdin:
            method, *args = json.loads(line)
            print(json.dumps(getattr(steps, method)(*args)), flush=True)


class Checkout:
    """Ask the process of a checkout, which ends with this object's context."""

    def __init__(self, root: Path, adapters: int) -> None:
        # With the checkout's own `harness`; the process that compiles its kernels needs its packages, too.
        path = {**environment(root), "PYTHONPATH": os.pathsep.join(map(str, (root / "tests" / "benchmarks", root)))}
        command = [sys.executable, "-P", __file__, "--serve", str(adapters)]
        self._process = subprocess.Popen(
            command, cwd=root, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        imported = Path(self._answer())
        assert imported.is_relative_to(root), f"{imported} is not of {root}"

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def ask(self, *call: object) -> Any:
        """Return what a method of `Steps` returns."""
        assert self._process.stdin is not None
        print(json.dumps(call), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the other process ended with code {self._process.wait()}")
        return json.loads(line)


def pairs_of(
    old: Checkout, new: Checkout, work: str, turns: int
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Yield the figures of each pair of turns."""
    for checkout in (old, new):
        checkout.ask("begin", work, turns)
    for number in range(turns):
        order = (old, new) if number % 2 else (new, old)
        done = {checkout: checkout.ask("turn", work) for checkout in order}
        yield tuple({f"{work}{name} ms": ms for name, ms in done[each].items()} for each in (old, new))  # type: ignore[misc]
    for checkout in (old, new):
        checkout.ask("end")


def main() -> None:
    a = arguments(
        __doc__,
        versus=(Path, "another checkout of this project"),
        work=(("1/0", "4/0", "16/0", "16/16", "32/32", "prompt:64", "prompt:900", "prompt:4000"), "to compare"),
        turns=(14, "of each checkout"),
        serve=(0, "run steps of a checkout with so many adapters, as this script asks its own processes to"),
    )
    if a.serve:
        serve(a.serve)
        return
    if not a.versus:
        raise SystemExit("bench_turns.py: --versus is missing, the path of another checkout")
    other = a.versus.resolve()
    adapters = max([1, *(int(work.split("/")[1]) for work in a.work if not work.startswith(PROMPT))])
    rows = []
    with ExitStack() as stack:
        old, new = (stack.enter_context(Checkout(root, adapters)) for root in (other, ROOT))
        for work in a.work:
            rows += compared(list(pairs_of(old, new, work, a.turns)))
            print(f"{work} done", file=sys.stderr, flush=True)
    print(f"old: {revision(other)}; new: {revision(ROOT)}; {a.turns} turns each")
    table(("figure", "old, median", "new, median", "new/old, median", "min to max"), rows)


if __name__ == "__main__":
    main()
