"""A decoder without a scheduler: its steps, pages and adapters are laid out by hand."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from adapter_keys import key_of

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import INT8, AdapterKey, Form
from adapter_store.store import AdapterStore
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import read_tokenizer
from lorasrv.models.lora_sites import adapter_layout, base_shapes
from lorasrv.models.quantization import get_format
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.text.own_tokenizers import with_own_tokens
from lorasrv.worker.adapter_packing import pack_adapter
from lorasrv.worker.adapter_rows import own_tokens
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

PAGE_SIZE, PAGES = 4, 640


def float_weights(model: Path) -> ModelWeights:
    """Load a checkpoint's weights unchanged, for kernels in plain torch."""
    ops = Ops(torch.device("cpu"), "torch")
    return load_weights(open_checkpoint(str(model)), get_format("none", ops), torch.float32)


class HandDecoder:
    """A decoder with a small pool and manual steps, which returns the logits of the last row of each sequence."""

    def __init__(
        self,
        directory: Path,
        adapters: Mapping[str, Path],
        store: Path,
        kernels: str,
        dtype: torch.dtype = torch.float32,
        weights: str = "none",
        in_runs: int = 1,
        coded: Collection[str] = (),
    ) -> None:
        """`coded` are the names of the adapters that are stored as int8 codes."""
        checkpoint = open_checkpoint(str(directory))
        self.ops = Ops(torch.device("cpu"), kernels)
        self.weights = load_weights(checkpoint, get_format(weights, self.ops), torch.float32)
        spec = self.weights.spec
        self.memory = DevicePool(spec, PAGES, PAGE_SIZE, KV_FORMATS["float32"], torch.device("cpu"))
        self.dtype = dtype
        self.decoder = Decoder(self.weights, self.memory, DecoderLimits(512, 512, 64, dtype), self.ops)
        self.placed: dict[str, tuple[AdapterKey, PlacedAdapter]] = {}
        end = PAGES
        with AdapterStore(store, base_shapes(spec)) as registered:
            for name, folder in adapters.items():
                key = register(registered, name, folder, directory, INT8 if name in coded else None)
                loaded = registered.load(key)
                tokens = own_tokens(self.weights, loaded, dtype)
                layout = adapter_layout(spec, loaded.spec, dtype.itemsize, tokens)
                # Extra pages for the unused space at the ends of runs.
                count = layout.num_pages(self.memory.page_bytes) + 16 * (in_runs - 1)
                end -= count
                bounds = [end + count * i // in_runs for i in range(in_runs + 1)]
                runs = [(first, last - first) for first, last in itertools.pairwise(bounds)]
                placed = layout.place(runs, self.memory.page_bytes)
                assert placed is not None
                packed = pack_adapter(self.weights, layout, loaded, dtype)
                self.memory.write_adapter(packed, placed)
                self.placed[name] = (key, placed)

    def scheduled(
        self, adapter: str | None, tokens: Sequence[int], start: int, table: tuple[int, ...]
    ) -> ScheduledRequest:
        """Return one sequence of a step, without drafts."""
        key = self.placed[adapter][0] if adapter else None
        return ScheduledRequest(RequestId(""), tuple(tokens), start, table, key, True, SamplingParams(), 0)

    def run(self, requests: Sequence[ScheduledRequest]) -> list[torch.Tensor]:
        """Return the logits of each request, [num_logit_rows, V]."""
        numbered = tuple(replace(scheduled, request_id=RequestId(str(i))) for i, scheduled in enumerate(requests))
        step = SchedulerOutput(numbered, dict(self.placed.values()), (), AdapterOrders(), 0)
        batch = build_batch(step, self.memory, self.dtype, self.ops)
        logits = self.decoder.forward(batch).clone()
        rows = torch.split(logits, [scheduled.num_logit_rows for scheduled in batch.sampled])
        found = dict(zip([scheduled.request_id for scheduled in batch.sampled], rows, strict=True))
        return [found[scheduled.request_id] for scheduled in numbered]

    def logits(self, requests: list[tuple[str | None, list[int], int, tuple[int, ...]]]) -> dict[int, torch.Tensor]:
        """Return the logits of each sequence (adapter, tokens, start, page table), by its index in the list."""
        return {i: rows[-1] for i, rows in enumerate(self.run([self.scheduled(*scheduled) for scheduled in requests]))}


def register(
    store: AdapterStore, name: str, folder: Path, model: Path | None = None, stored: Form | None = None
) -> AdapterKey:
    """Store an adapter; if `model` is given, with the adapter's tokenizer."""
    peft = read_peft_dir(folder)
    peft = peft if model is None else with_own_tokens(peft, lambda: read_tokenizer(str(model)))
    return key_of(store.register(name, peft.config, store.add_blob(peft.weights_path), stored=stored).ref)
