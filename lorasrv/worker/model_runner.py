"""Model runner: computes a scheduled step and samples its tokens. Owns the model and the pool's memory."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorasrv.metrics.step_stats import StepProfile
from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.sampling.draft_verification import choose_tokens, probed_tokens
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.logprobs import chosen_logprobs, prompt_logprobs
from lorasrv.sampling.rejection import Probabilities
from lorasrv.sampling.sampler import launch_sampling
from lorasrv.sampling.vocabularies import by_vocabulary
from lorasrv.scheduler_output import (
    NO_DRAFTS,
    DrafterOutput,
    ModelRunnerOutput,
    PageOp,
    ScheduledRequest,
    SchedulerOutput,
    path_along,
)
from lorasrv.worker.adapter_loader import WriteAdapter
from lorasrv.worker.decoder import Decoder, DecoderLimits, DecoderPass
from lorasrv.worker.device import ENGINE_THREADS, compiles_kernels, find_best_team
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads
from lorasrv.worker.draft_rows import LastStates
from lorasrv.worker.draft_runner import DraftRunner
from lorasrv.worker.exchange import Exchange
from lorasrv.worker.forward_batch import ForwardBatch, build_batch
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.medusa_runner import MedusaRunner
from lorasrv.worker.rehearsal import Rehearsal
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.backend import Progress
from sgmv_kernels.metadata.draft_trees import depths_of
from sgmv_kernels.ops import Ops

if TYPE_CHECKING:
    from lorasrv.worker.cuda_graphs import GraphedSteps
    from sgmv_kernels.triton_ops.kernel_compiler import LateKernels


_LOG = logging.getLogger(__name__)
NO_TOKENS: Mapping[RequestId, Sequence[int]] = MappingProxyType({})
_Masses = Mapping[RequestId, Sequence[Sequence[float]]]
BeforePass = Callable[[], None]


def do_nothing() -> None:
    """Do nothing: the default of a hook."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Hold a step that can begin as soon as its pending tokens are known."""

    step: SchedulerOutput
    decoder_pass: DecoderPass


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Hold a draft model: a second base with the same vocabulary."""

    weights: ModelWeights
    # Its keys and values, in pages of the same ids as the served model's.
    memory: DevicePool


class ModelRunner:
    """Run steps on one device.

    Args:
        draft_model: the drafter "model".
        draft_layers: layers of the served model that are the drafter "layers"; empty: no such drafter.
        draft_heads: the drafter "medusa".
        exchange: connects the processes that compute other parts of each pass; None if there are none.
    """

    def __init__(
        self,
        weights: ModelWeights,
        memory: DevicePool,
        limits: DecoderLimits,
        ops: Ops,
        draft_model: DraftModel | None = None,
        draft_layers: Sequence[int] = (),
        draft_heads: DraftHeads | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.profile = StepProfile()
        self._spec, self._memory = weights.spec, memory
        self._limits = limits
        self._ops = ops
        self._exchange = exchange or Exchange()
        self._decoder = Decoder(weights, memory, limits, ops, exchange=exchange)
        self._graphs: GraphedSteps | None = None
        self._late_kernels: LateKernels | None = None
        # The step launched last, whose tokens the next step may compute.
        self._last: LaunchedStep | ModelRunnerOutput | None = None
        self._before_pass: BeforePass = do_nothing
        # Seconds that this thread has computed of the current pass.
        self._seconds_of_pass = 0.0
        # When the last pass was complete, by `time.perf_counter`.
        self.ended_s = 0.0
        self._models: dict[str, DraftRunner | MedusaRunner] = {}
        self._medusa: MedusaRunner | None = None
        if draft_heads is not None:
            self._medusa = MedusaRunner(draft_heads, self._decoder.logits, limits.max_samples)
            self._models["medusa"] = self._medusa
        if draft_layers:
            skipping = Decoder(weights, memory, limits, ops, draft_layers)
            self._models["layers"] = DraftRunner(skipping, self._batch, limits, has_own_cache=False)
        # Decoder and pool of the draft model.
        self._drafting: tuple[Decoder, DevicePool] | None = None
        if draft_model is not None:
            decoder = Decoder(draft_model.weights, draft_model.memory, limits, ops)
            self._drafting = decoder, draft_model.memory
            self._models["model"] = DraftRunner(decoder, self._batch, limits, has_own_cache=True)
        self._draft_memory = None if draft_model is None else draft_model.memory
        # A pass that waits for other processes cannot be a graph.
        if compiles_kernels(memory.device, ops) and self._exchange.can_record:
            # Imported only here: it needs Triton.
            from lorasrv.worker import cuda_graphs

            record = cuda_graphs.cuda_recorder()
            self._graphs = cuda_graphs.GraphedSteps(self._decoder.forward, weights.spec, memory, limits, record)

    @property
    def num_late_kernels(self) -> int:
        """Return how many kernels steps have waited for despite the warm-up; 0 on a CPU."""
        return 0 if self._late_kernels is None else self._late_kernels.count

    def warm_up(
        self, max_rank: int, progress: Progress, others: AbstractContextManager[object], *, has_trees: bool = False
    ) -> None:
        """Compile the kernels of a GPU and capture the commonest graphs, while the pool is empty; do nothing on a CPU.

        Args:
            max_rank: highest rank of an adapter that is served.
            others: block in which the other processes of the model warm up, once this one has compiled its kernels,
                which are mostly theirs.
            has_trees: whether drafts may be trees.
        """
        if not compiles_kernels(self._memory.device, self._ops):
            with others:
                return
        from lorasrv.worker.warm_up import WarmUpSteps, compile_kernels, passes
        from sgmv_kernels.triton_ops.kernel_compiler import count_late

        limits, ops = self._limits, self._ops
        steps = WarmUpSteps(self._spec, self._memory, limits, max_rank, has_trees=has_trees)
        launches = passes(steps, self._decoder, self._memory, limits, ops)
        if self._drafting is not None:
            decoder, memory = self._drafting
            launches += passes(WarmUpSteps(decoder.weights.spec, memory, limits, 0), decoder, memory, limits, ops)
        compile_kernels(launches, progress)
        with others:
            for run in launches:
                run()
            if self._graphs is not None:
                for step in steps.common():
                    self._graphs.compute(step)
        self._late_kernels = count_late()

    def rehearsal(self) -> Sequence[SchedulerOutput]:
        """Return the steps to compute before the first request; none on a CPU, which loads nothing in a step."""
        if self._memory.device.type == "cpu":
            return ()
        page_size, drafters = self._memory.page_size, tuple(self._models)
        return tuple(Rehearsal(self._spec, self._limits, page_size, drafters, self._exchange).steps())

    @property
    def write_adapter(self) -> WriteAdapter:
        """Return the function that fills an adapter's pages, for loader threads."""
        return self._memory.write_adapter

    def read_pages(self, pages: tuple[int, ...]) -> Tensor:
        """Return pages, including the draft model's, in host memory: uint8 [P, bytes]. Call it between two steps, in
        their thread."""
        rows = self._memory.read_pages(pages)
        return rows if self._draft_memory is None else torch.cat((rows, self._draft_memory.read_pages(pages)), dim=1)

    def write_pages(self, rows: Tensor, copies: Sequence[tuple[int, int]]) -> None:
        """Fill pages from the result of `read_pages`, like `DevicePool.write_pages`; for loader threads."""
        own = self._memory.block_bytes
        self._memory.write_pages(rows[:, :own], copies)
        if self._draft_memory is not None:
            self._draft_memory.write_pages(rows[:, own:], copies)

    def commit_pages(self, slab: int, first_page: int, num_pages: int) -> None:
        """Have the system commit memory for pages of a slab, like `DevicePool.commit`."""
        self._memory.commit(slab, first_page, num_pages)

    def bind_thread(self, before_pass: BeforePass = do_nothing, most_threads: int = ENGINE_THREADS) -> None:
        """Give the calling thread, which will run steps, the number of compute threads that is fastest here, and call
        `before_pass` before each pass."""
        self._before_pass = before_pass
        find_best_team(self._ops, most_threads)

    def recover(self) -> bool:
        """Free unused device memory after an exception; return whether the device can still be used. Some errors (an
        illegal address, a failed assertion) destroy a CUDA context."""
        if self._memory.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._memory.device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        """Move, copy and swap pages in order; return the bytes copied to or from host memory."""
        swapped = self._memory.apply(ops)
        return swapped if self._draft_memory is None else swapped + self._draft_memory.apply(ops)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step whose page operations are done."""
        if not step.requests:
            return ModelRunnerOutput({})
        self._count(step)
        return self._sampled(step, *self._logits(step, None))

    @property
    def num_threads(self) -> int:
        """Return the number of threads that compute a step, including the calling one."""
        return self._decoder.num_threads

    def prepare(self, step: SchedulerOutput) -> "PreparedStep":
        """Prepare a step whose page operations are done, so that only pending tokens may be missing."""
        self._count(step)
        if self._medusa is not None:
            self._medusa.prepare(step)
        with self.profile.span("batch"):
            return PreparedStep(step, self._decoder.prepare(self._batch(step)))

    def begin(self, prepared: "PreparedStep", tokens: Mapping[RequestId, Sequence[int]] = NO_TOKENS) -> None:
        """Begin to compute the step prepared last, once the previous step is complete.

        Args:
            tokens: tokens that the previous step has sampled.
        """
        self._before_pass()
        self._seconds_of_pass = 0.0
        with self.profile.span("forward"):
            prepared.decoder_pass.batch.fill({request: own[-1] for request, own in tokens.items() if own})
            self._decoder.begin(prepared.decoder_pass)
        if tokens is not NO_TOKENS:
            self.profile.gaps += 1
            self.profile.gap_s += time.perf_counter() - self.ended_s

    def take_part(self, seconds: float) -> None:
        """Help to compute the current step for about so long, if other threads are computing it."""
        begun = time.perf_counter()
        self._decoder.take_part(seconds)
        self._seconds_of_pass += time.perf_counter() - begun

    def wait(self) -> None:
        """Wait until no other thread computes."""
        self._decoder.wait()

    def close(self) -> None:
        """Stop the reads that run beside the steps."""
        if self._medusa is not None:
            self._medusa.close()

    def settle(self) -> None:
        """Complete the pass of the current step, if there is one; its pages may be moved afterwards."""
        begun = time.perf_counter()
        self._decoder.settle()
        self._seconds_of_pass += time.perf_counter() - begun

    def complete(self, prepared: "PreparedStep") -> ModelRunnerOutput:
        """Complete the current step, and sample its tokens."""
        begun = time.perf_counter()
        batch = prepared.decoder_pass.batch
        logits = self._decoder.complete(prepared.decoder_pass)
        self.ended_s = self._decoder.ended_s
        taken_part_s = self._seconds_of_pass + time.perf_counter() - begun
        self.profile.add_kernels(taken_part_s, self._decoder.kernel_seconds())
        return self._sampled(prepared.step, logits, batch.sampled, batch.asked, batch.masses())

    def _count(self, step: SchedulerOutput) -> None:
        self.profile.steps += 1
        self.profile.rows += step.num_tokens

    def _sampled(
        self,
        step: SchedulerOutput,
        logits: Tensor,
        sampled: tuple[ScheduledRequest, ...],
        asked: tuple[ScheduledRequest, ...],
        masses: _Masses,
    ) -> ModelRunnerOutput:
        with self.profile.span("sampling"):
            output = self._output(logits, sampled, asked, masses)
        return self._with_drafts(step, output, sampled)

    def launch(self, step: SchedulerOutput) -> LaunchedStep | ModelRunnerOutput:
        """Put a step into a GPU's queue; the step launched before it samples the pending tokens.

        Returns:
            The argument for `finish`: already the output, if the step asks for more than tokens.
        Raises:
            RuntimeError: the previous step, which samples the pending tokens, could not be launched.
        """
        last, self._last = self._last, None
        if last is None and any(s.is_pending for s in step.requests):
            raise RuntimeError("the step before, whose tokens this one takes, could not be launched")
        if isinstance(last, ModelRunnerOutput):
            step, last = step.with_tokens({request: tokens[-1] for request, tokens in last.sampled.items()}), None
        self._count(step)
        logits, sampled, asked, masses = self._logits(step, last)
        with self.profile.span("sampling"):
            if asked or masses or any(map(_asks_for_more, sampled)):
                self._last = self._with_drafts(step, self._output(logits, sampled, asked, masses), sampled)
            else:
                rows = [SamplingMetadata.of(s) for s in sampled]
                self._last = LaunchedStep(sampled, launch_sampling(logits[: len(sampled)], rows))
        return self._last

    def finish(self, launched: LaunchedStep | ModelRunnerOutput) -> ModelRunnerOutput:
        """Wait for a launched step and return its output."""
        if isinstance(launched, ModelRunnerOutput):
            return launched
        with self.profile.span("device"):
            return ModelRunnerOutput(launched.wait())

    def _output(
        self,
        logits: Tensor,
        sampled: tuple[ScheduledRequest, ...],
        asked: tuple[ScheduledRequest, ...],
        masses: _Masses,
    ) -> ModelRunnerOutput:
        chosen, logprobs = dict[RequestId, tuple[int, ...]](), dict[RequestId, tuple[TokenLogprobs, ...]]()
        of_prompts, probed = dict[RequestId, tuple[TokenLogprobs, ...]](), dict[RequestId, tuple[int, ...]]()
        for part in by_vocabulary(logits, self._decoder.likeliest, sampled, asked, self._spec.vocab_size):
            count = part.num_sampled_rows
            best = self._ops.likeliest(part.logits[:count]) if part.likeliest is None else part.likeliest
            # An adapter's weights may overflow: its requests fail, the others of the step do not.
            chosen |= choose_tokens(part.logits, part.sampled, self._drawn_from, best)
            logprobs |= chosen_logprobs(part.logits, part.sampled, chosen)
            of_prompts |= prompt_logprobs(part.logits[count:], part.asked)
            probed |= probed_tokens(best, part.sampled)
        self._bring_together(sampled, chosen)
        return ModelRunnerOutput(chosen, logprobs, of_prompts, probed, masses=masses)

    def _bring_together(self, sampled: Sequence[ScheduledRequest], chosen: Mapping[RequestId, Sequence[int]]) -> None:
        """Move the keys and values of accepted draft tokens of trees directly after those of the known tokens."""
        trees = [s for s in sampled if s.draft_parents and s.request_id in chosen]
        moves = [
            scheduled.moves_along(
                path_along(scheduled.draft_token_ids, scheduled.draft_parents, chosen[scheduled.request_id])
            )
            for scheduled in trees
        ]
        if any(move.sources for move in moves):
            self._memory.copy_slots(moves, self._ops)
            self._exchange.on_slots_moved(moves)

    def _drawn_from(self, scheduled: ScheduledRequest, at: int) -> Probabilities | None:
        """Return the distribution that a draft token was drawn from; None if it was not drawn."""
        model = self._models.get(scheduled.drafts.drafters[at])
        depth = depths_of(scheduled.draft_parents)[at] - 1 if scheduled.draft_parents else at
        return None if model is None else model.drawn_from(scheduled, depth)

    def _with_drafts(
        self, step: SchedulerOutput, output: ModelRunnerOutput, sampled: Sequence[ScheduledRequest]
    ) -> ModelRunnerOutput:
        """Ask the draft models for the drafts that the step plans. A model that raises is never used again; answers
        continue without it."""
        drafted = dict[str, DrafterOutput]()
        last = LastStates(self._decoder.states, sampled)
        for name, model in tuple(self._models.items()):
            asking = [s for s in step.requests if s.drafts.num_asked and s.drafts.asked == name]
            if asking:
                try:
                    with self.profile.span("drafting"):
                        drafted[name] = model.draft(step, asking, output.sampled, last)
                except Exception:
                    _LOG.exception("drafter %s failed; answers go on without it", name)
                    del self._models[name]
                    drafted[name] = DrafterOutput(has_failed=True)
        return replace(output, drafted=drafted) if drafted else output

    def _logits(
        self, step: SchedulerOutput, last: LaunchedStep | None
    ) -> tuple[Tensor, tuple[ScheduledRequest, ...], tuple[ScheduledRequest, ...], _Masses]:
        """Return the logits of a step.

        Returns:
            Logits [S, V] fp32; the requests whose `num_logit_rows` are the first rows; those whose `prompt_rows` are
            the other rows; the attention paid to pages.
        """
        if self._medusa is not None:
            self._medusa.prepare(step)
        if self._graphs is not None:
            self._before_pass()
            with self.profile.span("batch"):
                graphed = self._graphs.compute(step, last)
            if graphed is not None:
                return *graphed, (), {}
        with self.profile.span("batch"):
            batch = self._batch(step, last)
        self._before_pass()
        begun = time.perf_counter()
        logits = self._decoder.forward(batch)
        self.profile.add_kernels(time.perf_counter() - begun, self._decoder.kernel_seconds())
        return logits, batch.sampled, batch.asked, batch.masses()

    def _batch(self, step: SchedulerOutput, last: LaunchedStep | None = None) -> ForwardBatch:
        return build_batch(step, self._memory, self._limits.adapter_dtype, self._ops, last, self._exchange)


def _asks_for_more(scheduled: ScheduledRequest) -> bool:
    """Return whether a request asks for more than a token of the base's vocabulary."""
    return scheduled.drafts is not NO_DRAFTS or scheduled.sampling.logprobs is not None or scheduled.vocab_size > 0
