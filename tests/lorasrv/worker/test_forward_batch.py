"""Rows of a step with draft trees: their positions, and what a decoder computes of them, before and after the accepted
ones are moved together."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hand_decoder import PAGE_SIZE, HandDecoder
from peft_adapters import peft_adapter

from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, PlannedDrafts, ScheduledRequest, SchedulerOutput, SlotMoves
from lorasrv.worker.step_rows import StepRows

TREE = (-1, 0, 0, -1, 2, 4, 3, -1, 5, 8, 1, 9)
"""Its deepest path is 0, 2, 4, 5, 8, 9, 11: side branches lie between."""
CHAIN = tuple(range(-1, 11))


def drafted(scheduled: ScheduledRequest, drafts: Sequence[int], parents: tuple[int, ...]) -> ScheduledRequest:
    """The share with draft tokens behind its own."""
    tokens = (*scheduled.token_ids, *drafts)
    return replace(scheduled, token_ids=tokens, drafts=PlannedDrafts(tuple(drafts), parents=parents))


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def scheduled(count: int, start: int, drafts: int = 0, parents: tuple[int, ...] = ()) -> ScheduledRequest:
    pages = tuple(range(-(-(start + count + drafts) // PAGE_SIZE)))
    plain = ScheduledRequest(RequestId("a"), (5,) * count, start, pages, None, True, SamplingParams(), 0)
    return drafted(plain, range(20, 20 + drafts), parents)


def rows_of(*requests: ScheduledRequest) -> StepRows:
    return StepRows.of(SchedulerOutput(requests, {}, (), AdapterOrders(), 0))


def test_a_position_is_a_depth() -> None:
    tree, chain = scheduled(2, 10, 5, (-1, 0, 0, -1, 2)), scheduled(1, 7, 2)
    rows = rows_of(tree, scheduled(3, 0), chain)
    assert rows.positions.tolist() == [10, 11, 12, 13, 13, 12, 14, 0, 1, 2, 7, 8, 9]
    assert rows.kv_lens.tolist() == [17, 3, 10]
    assert rows.logit_rows.tolist() == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert rows.parents == [(-1, 0, 0, -1, 2), (), ()]
    assert rows_of(chain).parents == []
    assert (tree.num_known_tokens, tree.num_logit_rows, tree.without_drafts()) == (
        2,
        6,
        replace(scheduled(2, 10), page_table=tree.page_table),
    )
    assert rows_of(scheduled(1, 7, 2, (-1, 0))).positions.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("drafts", "parents", "message"),
    [
        (65, tuple(range(-1, 64)), "65 parents"),
        (2, (-1,), "1 parents"),
        (2, (1, -1), "behind its child"),
        (1, (-2,), "behind"),
    ],
)
def test_no_tree(drafts: int, parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        rows_of(scheduled(1, 7, drafts, parents))


def test_moves_along_a_path() -> None:
    tree = scheduled(3, 10, len(TREE), TREE)
    assert tree.moves_along(path_to(11, TREE)) == SlotMoves(
        tree.page_table, (15, 17, 18, 21, 22, 24), (14, 15, 16, 17, 18, 19)
    )
    assert tree.moves_along([0]) == tree.moves_along([]) == SlotMoves(tree.page_table, (), ())


@pytest.fixture
def served(tiny_hf_checkpoints, tmp_path: Path) -> Callable[..., HandDecoder]:
    """Decoders of tiny models with an adapter "a"."""

    def make(family: str, kernels: str, **options: str) -> HandDecoder:
        directory = tiny_hf_checkpoints[family]()
        own = {"phi3": ["qkv_proj"], "mpt": ["Wqkv", "down_proj"]}
        targets = own.get(family, ["q_proj", "v_proj", "down_proj"])
        adapter = tmp_path / f"a-{family}"
        if not adapter.exists():
            peft_adapter(directory, adapter, seed=3, r=4, lora_alpha=8, target_modules=targets)
        name = f"store-{len(list(tmp_path.iterdir()))}"
        return HandDecoder(directory, {"a": adapter}, tmp_path / name, kernels, **options)

    return make


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((family, "numba") for family in ("llama", "gemma2", "gemma3", "mpt")),
        *((family, "torch") for family in ("gemma3", "mpt")),
        # In the interpreter these take a minute or more.
        *(pytest.param(family, "triton", marks=pytest.mark.exhaustive) for family in ("gemma3", "mpt")),
    ],
)
def test_a_tree_is_its_paths(served: Callable[..., HandDecoder], family: str, kernels: str) -> None:
    """Each node as its path computed alone; and so goes on what follows, once the accepted drafts are together."""
    model, rng = served(family, kernels), random.Random(5)
    prompts = [[rng.randrange(3, 380) for _ in range(n)] for n in (13, 22, 9)]
    adapters, tables = [None, "a", "a"], [tuple(range(12 * i, 12 * i + 12)) for i in range(3)]
    drafts = [[rng.randrange(3, 380) for _ in TREE] for _ in prompts]
    elsewhere = tuple(range(36, 48))

    def alone(i: int, tokens: Sequence[int]) -> torch.Tensor:
        return model.logits([(adapters[i], prompts[i] + list(tokens), 0, elsewhere)])[0]

    model.logits([(adapters[i], prompts[i][:-2], 0, tables[i]) for i in range(2)])
    last = [model.scheduled(adapters[i], prompts[i][-2:], len(prompts[i]) - 2, tables[i]) for i in range(2)]
    trees = [drafted(last[0], drafts[0], TREE), drafted(last[1], drafts[1], TREE)]
    got = model.run([*trees, model.scheduled("a", prompts[2], 0, tables[2])])
    torch.testing.assert_close(got[2][0], alone(2, []), rtol=1e-3, atol=1e-4)
    paths = [[], *(path_to(node, TREE) for node in range(len(TREE)))]
    for i in range(2):
        want = torch.stack([alone(i, [drafts[i][node] for node in path]) for path in paths])
        torch.testing.assert_close(got[i], want, rtol=1e-3, atol=1e-4)
    accepted = [path_to(11, TREE), path_to(6, TREE)]
    model.memory.copy_slots([tree.moves_along(path) for tree, path in zip(trees, accepted, strict=True)], model.ops)
    for i, path in enumerate(accepted):
        said = [drafts[i][node] for node in path]
        start = len(prompts[i]) + len(said)
        then = model.logits([(adapters[i], [7, 8, 9], start, tables[i])])[0]
        torch.testing.assert_close(then, alone(i, [*said, 7, 8, 9]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mpt"])
def test_a_recorded_tree_is_the_tree(served: Callable[..., HandDecoder], family: str) -> None:
    """Bit for bit, logits, keys and values; and a chain written as a tree is the chain."""
    recorded, called, plain = (served(family, "numba", weights="int4") for _ in range(3))
    assert recorded.decoder._program is not None
    called.decoder._program = None
    rng = random.Random(2)
    tables = [tuple(range(12 * i, 12 * i + 12)) for i in range(3)]
    tokens = [[rng.randrange(3, 380) for _ in range(30)] for _ in tables]
    parents = {recorded: (TREE, CHAIN, ()), called: (TREE, CHAIN, ()), plain: ((), (), ())}
    for step in range(3):
        got = {}
        for model, trees in parents.items():
            requests = [
                model.scheduled(name, tokens[i][:3], 15 * step, tables[i]) for i, name in enumerate((None, "a", "a"))
            ]
            got[model] = model.run([drafted(s, tokens[i][3:15], trees[i]) for i, s in enumerate(requests)])
        assert all(torch.equal(got[recorded][i], got[called][i]) for i in range(3))
        if not step:
            assert all(torch.equal(got[recorded][i], got[plain][i]) for i in (1, 2))
            assert torch.equal(got[recorded][0][:2], got[plain][0][:2])
            assert not torch.isclose(got[recorded][0][3:], got[plain][0][3:]).all(-1).any()
    assert all(torch.equal(recorded.memory.slab(layer), called.memory.slab(layer)) for layer in range(2))
