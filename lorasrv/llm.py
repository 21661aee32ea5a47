"""Offline use: `LLM("smollm2-135m").generate(prompts, sampling, adapter_ids=[...])`, without a server or own
threads."""

import itertools
import json
import math
import operator
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType

from adapter_store.composition import Composition, is_sum, parse_sum
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.spec import BF16, AdapterKey, AdapterRef, Form
from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL, EngineConfig
from lorasrv.engine.core import EngineCore
from lorasrv.engine.factory import build
from lorasrv.engine.input_processor import further_choices
from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.errors import AdapterLoadFailed, InvalidRequest
from lorasrv.kv_policy import KvPolicy
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import checkpoint_name
from lorasrv.models.lora_sites import base_shapes
from lorasrv.outputs import Completion, RequestId, RequestOutput, refused
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.own_tokenizers import with_own_tokens
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_loader import InlineLoader

MAX_SLEEP_S = 0.05
"""Longest sleep. Steps load adapters themselves, so a step without progress only waits for a rate or a time."""


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the engine's accounts are consistent: it raises in the yielded function, or at the end of the
    block. A second Ctrl-C raises at once. Only the main thread gets signals.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = True

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


@dataclass
class _Answer:
    processor: OutputProcessor
    parts: list[RequestOutput] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.parts) and self.parts[-1].finished

    def completion(self) -> Completion:
        last = self.parts[-1]
        assert last.finish_reason is not None
        if last.error is not None:
            raise refused(last) or AdapterLoadFailed(last.error)
        return Completion(
            text="".join(part.text for part in self.parts),
            token_ids=[token for part in self.parts for token in part.token_ids],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            timing=last.timing,
            logprobs=tuple(one for part in self.parts for one in part.logprobs),
            prompt_logprobs=self.parts[0].prompt_logprobs,
        )


_Named = tuple[AdapterRef | None, Composition]
"""(version that was named first, composition that answers)."""


class LLM:
    """Serve a base model and its adapters in this process.

    Args:
        model: built-in name, Hugging Face directory or .gguf file.
        config: everything else; its `model.model` is replaced by `model`.
        store: folder of registered adapters; None keeps them for the lifetime of this object.
    """

    def __init__(
        self, model: str | Path = BUILTIN_MODEL, config: EngineConfig | None = None, store: Path | str | None = None
    ) -> None:
        model, config = str(model), config or EngineConfig()
        self._config = replace(config, model=replace(config.model, model=model))
        with ExitStack() as opened:
            root = Path(store or opened.enter_context(tempfile.TemporaryDirectory(prefix="lorasrv-")))
            options = config.model
            with closing(open_checkpoint(model, options.load_format, options.quantized_weights)) as checkpoint:
                shapes = base_shapes(checkpoint.spec, checkpoint.name, checkpoint_name(model))
                self.store = AdapterStore(root, shapes, max_lora_rank=self._config.memory.max_lora_rank)
                opened.callback(self.store.close)
                built = build(checkpoint, self._config, self.store)
            self._opened = opened.pop_all()
        assert built.parts.source is not None
        self.spec, self.tokenizer, self.chat_template = built.spec, built.tokenizer, built.chat_template
        self._own_tokenizers = built.own_tokenizers
        loader = InlineLoader(built.parts.source, built.parts.executor.write_adapter)
        self.weights = built.weights
        self.engine = EngineCore(built.parts, loader)
        self.input_processor = built.input_processor
        self._numbers = itertools.count()
        # Calls of several threads take turns; otherwise each could take the other's outputs.
        self._running = threading.Lock()

    def add_adapter(
        self,
        adapter_id: str,
        directory: Path | str,
        *,
        allow_partial: bool = False,
        stored: Form = BF16,
        allow_drift: bool = False,
    ) -> AdapterRef:
        """Register a PEFT or MLX adapter folder under a name, with the tokens that its tokenizer.json adds, if any.

        Args:
            allow_partial: accept a config that names more modules than there are tensors for.
            stored: the form in memory; "int8" takes half the memory and changes the adapter by about 0.7 %.
            allow_drift: accept int8 however much it changes the adapter.

        Raises:
            AdapterInvalid: the adapter cannot be served; the error lists every problem found.
        """
        with open_adapter_dir(Path(directory)) as found:
            peft = with_own_tokens(found, lambda: self.tokenizer)
            digest = self.store.add_blob(peft.weights_path)
            return self.store.register(
                adapter_id,
                peft.config,
                digest,
                allow_partial=allow_partial,
                stored=stored,
                allow_drift=allow_drift,
            ).ref

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        adapter_ids: Sequence[str | None] | None = None,
        kv_policy: KvPolicy | None = None,
        *,
        ignore_defaults: bool = False,
    ) -> list[Completion]:
        """Answer all prompts in shared batches, in order.

        Args:
            prompts: texts or token ids.
            sampling: one for all prompts, or one for each.
            adapter_ids: a reference or a sum (`mia+0.5*style`) for each prompt; None for the base.
            kv_policy: which keys and values the tokens of each request see; None: all before them.
            ignore_defaults: use only the weights of versions with defaults (personas), or the base if they have none.
                Otherwise such versions are refused, because only the server applies defaults.

        Raises:
            InvalidRequest, NotComposable, PoisonRequest, AdapterNotFound, AdapterLoadFailed, OutOfMemory: there are no
                partial results.
            RequestTimeout, LimitExceeded: a queue timeout or limit of the configuration was reached.
            EngineDead, DeviceLost: no step can be computed any more: a process of the partition has ended or does not
                answer, or the device is broken. Load the model again.
        """
        _check_several(prompts)
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        _check_one_each("sampling", each, prompts)
        triples = zip(prompts, each, self._resolved(adapter_ids, prompts, ignore_defaults), strict=True)
        return self._run([self._message(*args, kv_policy=kv_policy) for args in triples])

    def _run(self, messages: Sequence[EngineCoreRequest]) -> list[Completion]:
        answers = {m.request_id: self._answer(m) for m in messages}
        with self._running, _interrupted_between_steps() as check:
            try:
                for message in messages:
                    self.engine.add_request(message)
                while self.engine.has_requests:
                    check()
                    self._step(answers)
                    if not self.engine.made_progress and self.engine.idle_s < math.inf:
                        time.sleep(min(self.engine.idle_s, MAX_SLEEP_S))
                # The last request may have been refused before any step.
                self._step(answers)
            finally:
                # After an interrupt, no request may remain for the next call.
                for message in messages:
                    self.engine.abort(message.request_id)
                # Discard the usage, which only a server's ledger takes: it would grow with every adapter.
                self.engine.step_stats.take()
        return [answers[m.request_id].completion() for m in messages]

    def beam_search(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams,
        beams: BeamOptions,
        adapter_ids: Sequence[str | None] | None = None,
        *,
        ignore_defaults: bool = False,
    ) -> list[list[Completion]]:
        """Return the `beams.width` likeliest answers to each prompt, best first.

        Args and errors are those of `generate`.
        """
        _check_several(prompts)
        groups = []
        for prompt, named in zip(prompts, self._resolved(adapter_ids, prompts, ignore_defaults), strict=True):
            first = self._message(prompt, sampling, named, beams)
            others = [RequestId(f"{first.request_id}.{beam}") for beam in range(1, beams.width)]
            groups.append([first, *further_choices(first, others)])
        done = iter(self._run([message for group in groups for message in group]))
        return [[next(done) for _ in group] for group in groups]

    def close(self) -> None:
        """Close the store; a temporary one is removed."""
        self.engine.close()
        self._opened.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, answers: dict[RequestId, _Answer]) -> None:
        for output in self.engine.step():
            answer = answers.get(output.request_id)
            if answer is None or answer.finished:
                continue
            part = answer.processor.process(output)
            answer.parts.append(part)
            if part.finished and output.finish_reason is None:
                self.engine.stop(output.request_id)

    def _resolved(
        self, references: Sequence[str | None] | None, prompts: Sequence[object], ignore_defaults: bool
    ) -> list[_Named]:
        if references is None:
            references = [None] * len(prompts)
        _check_one_each("adapter_ids", references, prompts)
        named = [self._find(reference) for reference in references]
        for ref, _ in named:
            if ref is not None and ref.persona and not ignore_defaults:
                raise InvalidRequest(
                    f"{ref.adapter_id}@{ref.version} has defaults (a system prompt, sampling, ...), which only the "
                    "server applies (lorasrv serve); ignore_defaults=True answers without them",
                    param="adapter_ids",
                )
        return named

    def _find(self, reference: str | None) -> _Named:
        if reference is None:
            return None, Composition.of(())
        parts = parse_sum(reference) if is_sum(reference) else [(reference, 1.0)]
        found = [(self.store.resolve(name), weight) for name, weight in parts]
        for ref, _ in found:
            if ref.key is None and "adapters" in json.loads(self.store.version_history.defaults(ref)):
                why = f"{ref.adapter_id}@{ref.version} is a stored sum; name its adapters: mia+0.5*style"
                raise InvalidRequest(why, param="adapter_ids")
        return found[0][0], self.store.compositions.add(Composition.of((ref.key, weight) for ref, weight in found))

    def _message(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        named: _Named,
        beams: BeamOptions | None = None,
        kv_policy: KvPolicy | None = None,
    ) -> EngineCoreRequest:
        first, composition = named
        request_id = RequestId(f"offline-{next(self._numbers)}")
        name = "" if first is None else first.adapter_id
        options = RequestOptions(adapter_key=composition.key, adapter_id=name, beams=beams, kv_policy=kv_policy)
        return self.input_processor.process(request_id, _checked(prompt), sampling, options)

    def tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """Return the tokenizer of an adapter, which may have tokens of its own; None is the base.

        Raises:
            AdapterNotFound: there is no such adapter.
        """
        return self._tokenizer_of(None if adapter is None else self.store.resolve(adapter).key)

    def _tokenizer_of(self, key: AdapterKey | None) -> Tokenizer:
        assert self._own_tokenizers is not None, "there is a store"
        return self._own_tokenizers.of(key) or self.tokenizer

    def _answer(self, message: EngineCoreRequest) -> _Answer:
        detokenizer = Detokenizer(self._tokenizer_of(message.adapter_key), message.text)
        return _Answer(OutputProcessor(len(message.prompt_token_ids), message.sampling, detokenizer))


def _checked(prompt: str | Sequence[int]) -> str | tuple[int, ...]:
    """Return a text, or token ids of any integer type, such as numpy's.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(prompt, str):
        return prompt
    with suppress(TypeError):
        if not isinstance(prompt, bytes):
            return tuple(map(operator.index, prompt))
    why = f"each of {{param}} must be a text or a list of token ids, not {type(prompt).__name__}"
    raise InvalidRequest(why, param="prompts")


def _check_several(prompts: object) -> None:
    """Raises: InvalidRequest: it is one text, of which every character would be a prompt."""
    if isinstance(prompts, str):
        raise InvalidRequest("prompts is one text; give a list: [text]", param="prompts")


def _check_one_each(name: str, given: Sequence[object], prompts: Sequence[object]) -> None:
    """Raises: InvalidRequest: it is one text, of which every character would be one, or has another length."""
    if isinstance(given, str):
        raise InvalidRequest(f"{name} is one text; give a list with one for each prompt: [text]", param=name)
    if len(given) != len(prompts):
        why = f"{name} has {len(given)} entries, prompts {len(prompts)}; give one for each prompt"
        raise InvalidRequest(why, param=name)
