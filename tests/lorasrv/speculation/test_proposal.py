"""Merged chains: every chain is a path, each token has the best chance, and any first tokens are a tree."""

from hypothesis import given
from hypothesis import strategies as st

from lorasrv.scheduler_output import path_along
from lorasrv.speculation.proposal import Chain, Proposal
from sgmv_kernels.metadata.draft_trees import ROOT


@st.composite
def chain(draw: st.DrawFn) -> Chain:
    tokens = draw(st.lists(st.integers(0, 2), max_size=6))
    shares = draw(st.lists(st.floats(0.05, 1.0), min_size=len(tokens), max_size=len(tokens)))
    survival, chance = [], 1.0
    for share in shares:
        chance *= share
        survival.append(chance)
    return Chain(draw(st.sampled_from("abc")), tokens, survival)


@given(st.lists(chain(), max_size=4), st.integers(0, 12))
def test_merged(chains: list[Chain], count: int) -> None:
    whole = Proposal.merged(chains)
    assert list(whole.survival) == sorted(whole.survival, reverse=True)
    some = whole.first(count)
    assert all(ROOT <= parent < at for at, parent in enumerate(some.parents))
    assert len(set(zip(whole.parents, whole.token_ids, strict=True))) == len(whole.token_ids)
    for name, tokens, survival in chains:
        path = path_along(whole.token_ids, whole.parents, tokens)
        assert [whole.token_ids[at] for at in path] == list(tokens), name
        assert all(whole.survival[at] >= chance for at, chance in zip(path, survival, strict=True))
        assert path_along(some.token_ids, some.parents, tokens) == [at for at in path if at < count]
    best = {chance for one in chains for chance in one.survival}
    assert set(whole.survival) <= best


@given(chain())
def test_one_chain_is_itself(one: Chain) -> None:
    merged = Proposal.merged([one])
    assert (merged.token_ids, merged.survival) == (tuple(one.token_ids), tuple(one.survival))
    assert merged.is_chain
    assert set(merged.drafters) <= {one.drafter}
    assert path_along(merged.token_ids, (), one.token_ids) == list(range(len(one.token_ids)))
