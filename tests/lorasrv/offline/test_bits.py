"""The choice of formats for a number of bits: the allotment against trying all, and sensitivities as measured."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.code_format import CodeFormat
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.quantization.unquantized import FloatLinear
from lorasrv.models.spec import SiteShape
from lorasrv.offline.bits import SCALE_BITS, Option, allot, candidates, check_bits, choose_formats
from lorasrv.offline.quantize import load_floats
from lorasrv.worker.weights import ModelWeights

TEXTS = [[(7 * i + 3 * j) % 380 for i in range(60)] for j in range(4)]
INT4 = CodeFormat("int4", 64)


@pytest.fixture(scope="module")
def floats(model: Path) -> Iterator[Checkpoint]:
    with closing(open_checkpoint(str(model))) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def weights(floats: Checkpoint) -> ModelWeights:
    return load_floats(floats, lambda *_: None)


OPTIONS = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5
)


@settings(max_examples=200, deadline=None)
@given(OPTIONS, st.floats(0, 1))
def test_the_budget_holds_and_nothing_better_is_near(made: list[list[tuple[int, float]]], share: float) -> None:
    options = [[Option(INT4, size, harm) for size, harm in each] for each in made]
    least, most = (sum(pick(o.size for o in each) for each in options) for pick in (min, max))
    budget = least + share * (most - least)
    chosen = allot(options, budget)
    assert sum(option.size for option in chosen) <= budget
    harm = sum(option.harm for option in chosen)
    fitting = [all_ for all_ in product(*options) if sum(o.size for o in all_) <= budget]
    best = min(sum(option.harm for option in all_) for all_ in fitting)
    # What a multiplier can miss is one option's step.
    step = max(max(o.harm for o in each) - min(o.harm for o in each) for each in options)
    assert best - 1e-9 <= harm <= best + step + 1e-9


@settings(max_examples=100, deadline=None)
@given(OPTIONS)
def test_what_a_multiplier_leaves_is_spent(made: list[list[tuple[int, float]]]) -> None:
    """No larger option that is better fits any more, and more to spend never does more harm."""
    options = [[Option(INT4, size, harm) for size, harm in each] for each in made]
    least, most = (sum(pick(o.size for o in each) for each in options) for pick in (min, max))
    harms = []
    for budget in range(least, most + 1):
        chosen = allot(options, budget)
        left = budget - sum(option.size for option in chosen)
        assert left >= 0
        for now, each in zip(chosen, options, strict=True):
            assert now in each
            assert not [o for o in each if 0 < o.size - now.size <= left and o.harm < now.harm]
        harms.append(sum(option.harm for option in chosen))
    assert all(more <= less + 1e-9 for less, more in pairwise(harms))


def test_a_leftover_goes_to_the_step_that_saves_most_for_its_size() -> None:
    """The first step does not fit, at no price; of the others only one does."""
    first, second, third = ([Option(INT4, 4, 9.0), Option(INT4, 4 + size, 9.0 - harm)] for size, harm in STEPS)
    assert [option.size for option in allot([first, second, third], 12 + 3)] == [4, 7, 4]


STEPS = ((6, 6.6), (3, 3.0), (2, 1.0))
"""Size of a step and what it saves."""


def test_a_budget_for_everything_takes_the_least_harm() -> None:
    options = [[Option(INT4, 1, 3.0), Option(INT4, 2, 1.0), Option(INT4, 9, 2.0)]] * 3
    assert [option.harm for option in allot(options, 27)] == [1.0] * 3


def test_bits_go_where_rounding_harms_the_model(weights: ModelWeights) -> None:
    """`down` of the middle layer is made to add next to nothing, so that its errors, as large as any, are harmless."""
    layer = weights.layers[1]
    faint = replace(layer, down=FloatLinear(layer.down.dequantize() * 1e-4, None))
    changed = replace(weights, layers=(weights.layers[0], faint, weights.layers[2]))
    formats = choose_formats(changed, 5.0, TEXTS, lambda *_: None).formats
    assert formats["down"][1].name == "q3h"
    assert formats["down"][0].bits > formats["down"][1].bits < formats["down"][2].bits


def test_the_bytes_are_those_of_the_bits(weights: ModelWeights) -> None:
    chosen = choose_formats(weights, 4.0, TEXTS, lambda *_: None)
    sizes = {site.name: site.in_features * sum(site.out_features) for site in weights.spec.sites()}
    taken = sum(form.bits * sizes[site] for site, forms in chosen.formats.items() for form in forms)
    whole = weights.spec.num_layers * sum(sizes.values())
    assert (4.0 + SCALE_BITS) * whole * 0.97 <= taken <= (4.0 + SCALE_BITS) * whole
    assert chosen.harms.keys() == sizes.keys()
    finer = choose_formats(weights, 6.0, TEXTS, lambda *_: None)
    assert sum(finer.harms.values()) < sum(chosen.harms.values())


def test_groups_are_those_that_divide() -> None:
    def names(inputs: int) -> set[str]:
        return {str(form) for form in candidates(SiteShape("o", inputs, ("o_proj",), (64,)))}

    assert names(192) == {"int8:64", "int4:64", "q3h:64"}
    assert names(256) == {"int8:64", "int4:64", "q3h:64", "int8:128", "int4:128", "q3h:128"}
    assert names(96) == {"int8:32", "int4:32"}
    with pytest.raises(UnsupportedFormat, match="--bits: groups of 32 do not divide the 72 inputs"):
        names(72)


@pytest.mark.parametrize("bits", [0.0, 2.0, 3.43, 8.1, torch.nan, torch.inf])
def test_bits_that_no_formats_have_are_refused(floats: Checkpoint, bits: float) -> None:
    with pytest.raises(UnsupportedFormat, match=rf"--bits {bits:g}: choose from 3.5 to 8 for this model"):
        check_bits(floats.spec, bits)
