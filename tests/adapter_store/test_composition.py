"""Sums of adapters: their one normal form, and how they are written."""

import gc
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.composition import NUM_NEWEST, Composition, Compositions, parse_sum
from adapter_store.errors import NotComposable
from adapter_store.spec import AdapterKey

KEYS = [AdapterKey(f"{i:064x}") for i in range(5)]
WEIGHTS = st.floats(-4, 4, width=32)
PARTS = st.lists(st.tuples(st.sampled_from(KEYS), WEIGHTS), min_size=1, max_size=4)


@given(PARTS, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_each_content_stands_once(parts, shuffle) -> None:
    mixed = list(parts)
    shuffle.shuffle(mixed)
    composition = Composition.of(parts)
    assert {key for key, _ in composition.weights} <= {key for key, _ in parts}
    assert [key for key, _ in composition.weights] == sorted({key for key, _ in composition.weights})
    if len({key for key, _ in parts}) == len(parts):
        assert Composition.of(mixed) == composition
        assert dict(composition.weights) == {key: weight for key, weight in parts if weight}


@given(PARTS, PARTS)
def test_keys_are_equal_only_for_equal_sums(one, other) -> None:
    first, second = Composition.of(one), Composition.of(other)
    assert (first.key == second.key) == (first.weights == second.weights)


def test_special_sums() -> None:
    a, b, *_ = KEYS
    assert Composition.of([(a, 1.0)]).key == a
    assert Composition.of([(a, 0.5), (a, 0.5)]).key == a
    assert not Composition.of([(a, 1.0), (b, 0.0)]).is_sum
    assert Composition.of([(a, 2.0), (a, -2.0)]).key is None
    assert Composition.of([(None, 1.0), (a, 1.0)]).key == a
    assert Composition.of([(a, 0.5)]).is_sum
    assert Composition.of([(a, 0.1)]).key == Composition.of([(a, 0.10000000149011612)]).key, "weights are float32"
    keys = {Composition.of(parts).key for parts in ([(a, 0.5)], [(a, 1), (b, 1)], [(a, 1), (b, -1)], [(b, 0.5)])}
    assert len(keys | {a, b}) == 6


def test_a_stored_sum_is_one_adapter_and_a_named_one_its_terms() -> None:
    """What they compute may differ in the last bits, so that they share nothing."""
    a, b, *_ = KEYS
    parts = [(b, 0.5), (a, 1.0)]
    named, stored = Composition.of(parts), Composition.of(parts, is_stored=True)
    assert named.terms == ((a, 1.0), (b, 0.5))
    assert stored.terms == ((stored.key, 1.0),)
    assert named.key != stored.key
    assert Composition.of([(a, 1.0)], is_stored=True).key == a


def test_a_sum_is_known_while_somebody_refers_to_it() -> None:
    known = Compositions()
    mine = known.add(Composition.of([(KEYS[0], 0.5)]))
    assert known.add(Composition.of([(KEYS[0], 0.5)])) is mine
    key = mine.key
    assert known.find(key) is mine
    kept = known.add(Composition.of([(KEYS[1], 0.5)]))
    del mine
    for number in range(NUM_NEWEST):
        assert known.find(key) is not None, "the newest are known for some time"
        known.add(Composition.of([(KEYS[0], 1.0 + number / 8192)]))
        known.add(Composition.of([(KEYS[0], 1.0)]))
    gc.collect()
    assert known.find(key) is None
    assert known.find(kept.key) is kept
    plain = known.add(Composition.of([(KEYS[0], 1.0)]))
    assert known.find(plain.key) is None, "one content as it is needs no sum"


def test_the_sums_that_contents_are_part_of() -> None:
    known, (a, b, c, *_) = Compositions(), KEYS
    kept = [known.add(Composition.of(parts)) for parts in ([(a, 0.5)], [(a, 1.0), (b, 1.0)], [(b, 2.0)], [(c, 3.0)])]
    assert set(known.having([a])) == {kept[0].key, kept[1].key}
    assert set(known.having([a, c])) == {kept[0].key, kept[1].key, kept[3].key}
    assert known.having([]) == []


def test_how_sums_are_written() -> None:
    assert parse_sum("mia+0.5*style@3") == [("mia", 1.0), ("style@3", 0.5)]
    assert parse_sum("-1*mia:prod+.25*b-c.d+2.*e") == [("mia:prod", -1.0), ("b-c.d", 0.25), ("e", 2.0)]
    for text in ("", "+", "a+", "a++b", "0.5*", "x*a", "1e3*a", "nan*a", "inf*a", "0x1*a", "1*2*a", " 1*a", "٣*a"):
        with pytest.raises(NotComposable, match="is no sum of adapters"):
            parse_sum(text)
    with pytest.raises(NotComposable, match=r"from -4 to 4, not 4\.5"):
        parse_sum("4.5*a")
    with pytest.raises(NotComposable, match="1 to 4 adapters, not 5"):
        parse_sum("+".join("abcde"))
    with pytest.raises(NotComposable, match="1 to 4 adapters, not 5"):
        parse_sum("++++")
    assert math.isclose(parse_sum("0.1*a")[0][1], 0.1)


def test_a_text_of_many_parts_is_refused_before_it_is_read() -> None:
    """A body may hold millions: they took seconds, and hundreds of megabytes."""
    text = "a+" * 1_000_000 + "a"
    tracemalloc.start()
    try:
        with pytest.raises(NotComposable, match="not 1000001"):
            parse_sum(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
