"""An input processor without a model, with one adapter and a simple tokenizer."""

from collections.abc import Sequence
from typing import Any

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import RequestId
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

VOCAB, CONTEXT, PAGE = 384, 256, 16
EOS = 7
RID = RequestId("r")
PROMPT = list(range(10, 30))
KEY = AdapterKey("0" * 64)
SITES = (SiteDims(8, (8,)),)
SMALL, LARGE = AdapterLayout(SITES, (((2,),),), 4), AdapterLayout(SITES, (((512,),),), 4)


class Words:
    """A tokenizer with one token per character, which declares up to eight characters per token."""

    num_encoded = 0

    def least_tokens(self, text: str) -> int:
        return len(text) // 8

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens
        self.num_encoded += 1
        return [ord(character) for character in text]


class Adapters:
    """A store with one adapter."""

    place = "the registry at http://10.0.0.1:8000 or the disk"

    def __init__(self, layout: AdapterLayout, max_host_bytes: int = 1 << 20) -> None:
        self._layout, self.max_host_bytes = layout, max_host_bytes
        self.is_hosted, self.is_known, self.num_heads = False, True, 0
        self.delay: Any = lambda: None

    def hold(self, key: AdapterKey, /) -> object:
        return ("held", key)

    def terms(self, key: AdapterKey, /) -> Sequence[tuple[AdapterKey, float]]:
        return [(key, 1.0)]

    def layout(self, _: AdapterKey, /) -> AdapterLayout:
        self.delay()
        return self._layout

    def knows_layout(self, key: AdapterKey) -> bool:
        return self.is_known

    def num_draft_heads(self, _: AdapterKey, /) -> int:
        return self.num_heads

    def vocab_size(self, _: AdapterKey, /) -> int:
        return 0

    def invocation_tokens(self, _: AdapterKey, /) -> tuple[int, ...]:
        return ()

    def is_on_host(self, key: AdapterKey) -> bool:
        return self.is_hosted


def processor(pages: int = 100, adapters: Adapters | None = None, **options: Any) -> InputProcessor:
    on_host = adapters.is_on_host if adapters else lambda _: False
    accounts = MemoryManager.make(PoolLayout(pages, PAGE, 1 << 12, 1), MemoryOptions(), is_on_host=on_host)
    options = {"tokenizer": Words(), "eos_token_ids": (EOS, VOCAB + 1), **options}
    return InputProcessor(accounts, adapters, CONTEXT, VOCAB, **options)
