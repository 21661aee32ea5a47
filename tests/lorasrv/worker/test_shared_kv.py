"""Layers that read the keys and values of others, against plain torch over whole texts: with adapters on all linears,
in chunks, swapped, found again, drafted, in fewer bits; and the accounts of a pool that has slabs for sources alone.
"""

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from all_drafts import every_draft
from hand_decoder import PAGES, HandDecoder, register
from mispredict import expect_short_answers
from shared_kv import (
    CONFIG,
    DIM,
    KV_HEADS,
    MODULES,
    PLACES,
    SOURCES,
    Reference,
    know_the_family,
    write_adapter,
    write_model,
)
from tiny_engine import GREEDY, engine_config, offline_engine

from adapter_store.errors import AdapterInvalid
from adapter_store.store import AdapterStore
from lorasrv.engine.memory_plan import block_bytes
from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.families import detect, tensor_shapes
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.loader.quantized import write_codes
from lorasrv.models.lora_sites import base_shapes, full_layout
from lorasrv.models.spec import ModelSpec, operations
from lorasrv.offline.planner.random_adapters import write_random_adapter
from lorasrv.offline.quantize import load_floats, quantize, read_formats
from lorasrv.speculation.drafters import draft_layers
from lorasrv.worker.weights import silent

SLABS = 2
PAGE_BYTES = 2 * KV_HEADS * DIM * 16 * 4
"""Of keys and values of 16 tokens in one slab, float32."""
PROMPTS = [[3 + (11 * i + 5 * j) % 370 for j in range(length)] for i, length in enumerate((7, 1, 33, 64, 50, 64))]
NAMES = [None, "mia", "ben", "mia", "ben", None]


@pytest.fixture(autouse=True)
def _known(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    know_the_family(tmp_path_factory.mktemp("family"), monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(parent / name, seed) for seed, name in enumerate(("mia", "ben"))}


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return read_model_shape(str(folder)).spec


@pytest.mark.parametrize(
    ("kernels", "weights"),
    [
        ("torch", "none"),
        ("numba", "none"),
        ("torch", "int8"),
        pytest.param("triton", "none", marks=pytest.mark.exhaustive),
    ],
)
def test_chunks_and_tokens_of_a_mixed_batch(
    folder: Path, adapters: dict[str, Path], tmp_path: Path, kernels: str, weights: str
) -> None:
    served = HandDecoder(folder, adapters, tmp_path / "store", kernels, weights=weights)
    used = {name: served.weights.dequantized(name) for name in tensor_shapes(served.weights.spec)}
    work = []
    for i, name in enumerate([None, "mia", "ben", "mia", None, "ben"]):
        ids = torch.randint(3, 384, (12 + 4 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        work.append((name, ids, tuple(range(i * 10, i * 10 + 10))))
    first = served.logits([(name, ids[: 3 + i], 0, table) for i, (name, ids, table) in enumerate(work)])
    second = served.logits([(name, ids[3 + i : -1], 3 + i, table) for i, (name, ids, table) in enumerate(work)])
    third = served.logits([(name, ids[-1:], len(ids) - 1, table) for name, ids, table in work])
    for i, (name, ids, _) in enumerate(work):
        want = Reference(folder, adapters[name] if name else None, used).logits(ids)
        got = torch.stack([step[i] for step in (first, second, third)])
        torch.testing.assert_close(got, want[[2 + i, -2, -1]], rtol=1e-3, atol=1e-4)
        if name is not None:
            assert (Reference(folder, None, used).logits(ids)[-1] - want[-1]).abs().max() > 0.3
    assert served.memory.nbytes == SLABS * PAGES * served.memory.page_bytes
    assert served.memory.slab(4).data_ptr() == served.memory.slab(0).data_ptr() != served.memory.slab(5).data_ptr()


def test_a_recorded_pass_is_the_pass(folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    recorded, called = (HandDecoder(folder, adapters, tmp_path / n, "numba", weights="int4") for n in "rc")
    assert recorded.decoder._program is not None
    called.decoder._program = None
    tables, names = [tuple(range(i * 10, i * 10 + 10)) for i in range(3)], [None, "mia", "ben"]
    for shares in (
        [(name, list(range(20 + i, 40 + i)), 0, tables[i]) for i, name in enumerate(names)],
        [(name, [50 + i], 20, tables[i]) for i, name in enumerate(names)],
        [(None, [60], 21, tables[0])],
    ):
        got, want = recorded.logits(shares), called.logits(shares)
        assert all(torch.equal(got[i], want[i]) for i in got)
    assert torch.equal(recorded.memory.slab(0), called.memory.slab(0))


@pytest.fixture(scope="module")
def greedy(folder: Path, adapters: dict[str, Path]) -> list[list[int]]:
    """What the reference answers."""
    asked = zip(PROMPTS, NAMES, strict=True)
    return [Reference(folder, adapters[n] if n else None).greedy(ids, GREEDY.max_tokens) for ids, n in asked]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_answers_of_a_small_pool(folder: Path, adapters: dict[str, Path], preemption: str) -> None:
    """In chunks of 24 rows, with pages that run out and prefixes that are found again, beside an adapter."""
    prompts, names = [[10 + (7 * i + n) % 300 for i in range(20)] for n in range(6)], [None, "mia"] * 3
    asked = [
        (Reference(folder, adapters[name] if name else None), ids) for ids, name in zip(prompts, names, strict=True)
    ]
    want = [reference.greedy(ids, 36) for reference, ids in asked]
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "swap_bytes": 1 << 22, "kernels": "torch"}
    options |= {"preemption_mode": preemption, "target_itl_ms": None, "pool_bytes": 24 * SLABS * PAGE_BYTES}
    sampling = replace(GREEDY, max_tokens=36)
    with offline_engine(folder, adapters, **options) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        assert [list(answer.token_ids) for answer in llm.generate(prompts, sampling, names)] == want
        assert [list(answer.token_ids) for answer in llm.generate(prompts[-2:], sampling, names[-2:])] == want[-2:]
        stats, memory = llm.engine.metrics.stats(), llm.engine._parts.memory
        llm.engine.check_integrity()
    assert stats.preemptions_total > 0
    assert (stats.swaps_total > 0) == (preemption == "swap")
    assert stats.cached_tokens_total > 0
    assert (stats.pages_total, memory.layout.block_bytes) == (24, SLABS * PAGE_BYTES)


def test_keys_in_codes_are_shared_too(folder: Path, adapters: dict[str, Path]) -> None:
    """Numba's bits do not depend on chunks, and 8-bit keys change few tokens."""
    found = []
    for rows, kv_cache_dtype in ((512, "int8"), (24, "int8"), (512, "float32")):
        options = {"kernels": "numba", "quantization": "int8", "kv_cache_dtype": kv_cache_dtype}
        options |= {"max_num_batched_tokens": rows, "max_num_seqs": 6}
        with offline_engine(folder, adapters, pages=200, **options) as llm:
            found.append([list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY, NAMES)])
    assert found[0] == found[1]
    assert [said[0] for said in found[0]] == [said[0] for said in found[2]]


def test_layers_that_draft_bring_their_sources(
    folder: Path, adapters: dict[str, Path], greedy: list[list[int]]
) -> None:
    assert draft_layers(6, 2, SOURCES) == (0, 2, 5)
    assert draft_layers(6, 2) == (0, 5)
    options = {"kernels": "torch", "speculation": "auto", "drafters": ("layers",), "draft_layers": 2}
    with every_draft(), offline_engine(folder, adapters, **options) as llm:
        assert [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY, NAMES)] == greedy
        assert sum(counts.drafted for counts in llm.engine._parts.scheduler.speculator.accounts.by_drafter.values()) > 0


def test_an_adapters_panels_lie_one_layer_after_another_in_their_slab(spec: ModelSpec) -> None:
    shared, apart = full_layout(spec, 4, 2), full_layout(replace(spec, kv_source_layers=()), 4, 2)
    assert shared.layers_of_slabs == ((0, 1, 4), (2, 3, 5))
    assert 2.5 * apart.slab_bytes < shared.slab_bytes < 3 * apart.slab_bytes
    placed = shared.place([(3, shared.num_pages(PAGE_BYTES))], PAGE_BYTES)
    assert placed is not None
    for layers in shared.layers_of_slabs:
        pieces = [placed.copies(layer) for layer in layers]
        assert [len(piece) for piece in pieces] == [1] * 3
        spans = [(target, target + size) for [(_, target, size)] in pieces]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= sum(placed.runs[0]) * PAGE_BYTES


def test_plans_count_slabs_and_the_linears_that_there_are(spec: ModelSpec, folder: Path) -> None:
    sizes = [MODULES[module][0] * MODULES[module][1] for _, module in PLACES]
    assert block_bytes([spec], engine_config(folder)) == SLABS * PAGE_BYTES
    assert (spec.linear_weights, operations(spec).token) == (sum(sizes), 2 * sum(sizes))
    assert list(base_shapes(spec).places()) == PLACES
    assert {name for name in tensor_shapes(spec) if "_proj" in name} == {
        f"model.layers.{layer}.{module}.weight" for layer, module in PLACES
    }


def test_linears_that_a_layer_does_not_have_take_no_adapter(spec: ModelSpec, tmp_path: Path) -> None:
    too_much = write_adapter(tmp_path / "much", 0, ((4, "self_attn.k_proj"), (3, "self_attn.v_proj")))
    with AdapterStore(tmp_path / "store", base_shapes(spec)) as store:
        with pytest.raises(AdapterInvalid, match=r"self_attn.v_proj of layer 3, which this base does not have"):
            register(store, "mia", too_much)
        # `all-linear` and a module's name mean the linears that there are.
        write_random_adapter(store, "ben", 3, 0)
        adapter = store.spec(store.resolve("ben").key)
    assert [(module.layer, module.module) for module in adapter.modules] == sorted(PLACES)


@pytest.mark.parametrize("quantization", ["int4", "attn=int4,mlp=int8"])
def test_quantized_ahead(folder: Path, tmp_path: Path, quantization: str) -> None:
    """Every linear that there is, and the file is served with as few codes as were written."""
    with closing(open_checkpoint(str(folder))) as floats:
        weights = load_floats(floats, silent)
        made = quantize(weights, read_formats(floats, quantization, 32), [list(range(3, 60))], silent)
        write_codes(tmp_path / "codes.safetensors", floats, made.formats, made.codes)
    assert {name.removesuffix(".weight") for name in made.codes} == {f"model.layers.{n}.{m}" for n, m in PLACES}
    with closing(open_checkpoint(str(folder), quantized_weights=str(tmp_path / "codes.safetensors"))) as held:
        assert all(torch.equal(held.codes(name).codes, codes.codes) for name, codes in made.codes.items())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_sources": [0, 0, 2]}, CorruptModel, "kv_sources must be 6 layers"),
        ({"kv_sources": "all"}, CorruptModel, "kv_sources must be 6 layers"),
        ({"kv_sources": [0, 0, 2, 2, 0, True]}, CorruptModel, "kv_sources must be 6 layers"),
        ({"kv_sources": [0, 2, 2, 2, 0, 2]}, CorruptModel, "gives layer 1 the keys of 2, which has none by then"),
        ({"kv_sources": [0, 0, 2, 2, 0, -1]}, CorruptModel, "gives layer 5 the keys of -1"),
        ({"kv_sources": [0, 0, 2, 2, 1, 2]}, CorruptModel, "gives layer 4 the keys of 1"),
        ({"kv_sources": [0, 0, 2, 2, 2, 2]}, UnsupportedModel, "layer 4 reads keys of layer 2, whose attention"),
    ],
)
def test_sources_that_cannot_be(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detect("SharedForCausalLM").spec_from_hf(CONFIG | changes)


def test_layers_that_all_have_their_own() -> None:
    spec = detect("SharedForCausalLM").spec_from_hf(CONFIG | {"kv_sources": list(range(6))})
    assert (spec.kv_source_layers, spec.num_slabs, len(spec.sites())) == ((), 6, 4)
