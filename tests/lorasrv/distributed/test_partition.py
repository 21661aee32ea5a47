"""Texts and counts that describe a partition, what each rank then computes, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorasrv.config import PartitionOptions
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank_spec import RankSpec, pool_widths
from lorasrv.errors import ConfigError
from lorasrv.models.spec import SHAPES, ModelSpec

SMALL = ModelSpec("llama", 6, 96, 160, 6, 3, 16, 400, 512, 1e-5)


def of(**options: object) -> Partition:
    return Partition.of(PartitionOptions(**options))  # type: ignore[arg-type]


def test_stages_and_columns_by_text() -> None:
    parts = of(partition="0&1@0-3;2@4-5").parts(SMALL)
    assert [(s.rank, s.stage, s.column, s.stage_ranks, s.layers) for s in parts] == [
        (0, 0, 0, (0, 1), (0, 4)),
        (1, 0, 1, (0, 1), (0, 4)),
        (2, 1, 0, (2,), (4, 6)),
    ]
    assert [s.kv_heads for s in parts] == [(0, 2), (2, 3), (0, 3)]
    assert [(s.hidden, s.inner, s.vocab) for s in parts[:2]] == [
        ((0, 48), (0, 96), (0, 208)),
        ((48, 96), (96, 160), (208, 400)),
    ]
    assert [(s.is_first, s.is_last) for s in parts] == [(True, False), (True, False), (False, True)]


def test_counts_are_short_for_a_text() -> None:
    assert of(tp=2, pp=2).stages == of(partition="0&1;2&3").stages
    assert of(pp=3).stages == of(partition="0;1;2").stages
    assert (of().num_ranks, of(tp=3).num_ranks, of(cp=3).num_ranks) == (1, 3, 3)
    assert [of(tp=2).kind, of(pp=2).kind, of(cp=2).kind, of(partition="0&1;2").kind] == [
        "columns",
        "stages",
        "rows",
        "stages and columns",
    ]


def test_ranks_of_rows_have_everything() -> None:
    parts = of(cp=2).parts(SMALL)
    assert [(s.rank, s.stage_ranks, s.layers, s.kv_heads, s.vocab) for s in parts] == [
        (0, (0,), (0, 6), (0, 3), (0, 400)),
        (1, (1,), (0, 6), (0, 3), (0, 400)),
    ]


def test_layers_go_by_bytes() -> None:
    """Embedding and head count: Llama 3 8B's are 525 million weights each, a layer's 218."""
    shape = SHAPES["llama-3-8b"]
    assert [s.layers for s in of(pp=2).parts(shape)] == [(0, 16), (16, 32)]
    assert [s.layers for s in of(pp=4).parts(shape)] == [(0, 7), (7, 16), (16, 25), (25, 32)]
    assert [s.layers for s in of(partition="0&1;2").parts(shape)] == [(0, 21), (0, 21), (21, 32)]


def test_a_layer_stays_with_the_one_whose_keys_it_reads() -> None:
    shared = replace(SMALL, kv_source_layers=(0, 1, 1, 1, 4, 4))
    assert of(pp=2).parts(shared)[1].layers in ((1, 6), (4, 6))
    with pytest.raises(ConfigError, match=r"--pp 5: 5 stages, but layers that read .* only 3 places"):
        of(pp=5).parts(shared)
    with pytest.raises(ConfigError, match="layer 3 or one behind it reads the keys and values of a layer before it"):
        of(partition="0@0-2;1@3-5").parts(shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": ""}, "--partition '' must be ranks, joined by & for columns and ; for stages"),
        ({"partition": "0&&1"}, "must be ranks"),
        ({"partition": "0;1;"}, "must be ranks"),
        ({"partition": "0-3"}, "must be ranks"),
        ({"partition": "0;٢"}, "must be ranks"),
        ({"partition": "0@3-1;1@4-5"}, "layers 3-1 of a stage are none"),
        ({"partition": "1;0"}, "2 ranks must be numbered 0 to 1, each once, and 0, which runs the engine, comes first"),
        ({"partition": "0;2"}, "numbered 0 to 1"),
        ({"partition": "0&0"}, "numbered 0 to 1"),
        ({"partition": "0&1", "tp": 2}, "--partition and --tp exclude each other"),
        ({"partition": ";".join(map(str, range(65)))}, "65 ranks are more than the 64"),
        ({"cp": 2, "tp": 2}, "--tp 2 --cp 2: --cp divides the rows .* so it goes with neither --tp nor --pp"),
        ({"pp": 2, "tp_exchange": "sums"}, "--tp-exchange sums needs ranks side by side: .*; --pp 2"),
        ({"tp": 2, "tp_exchange": "all"}, "--tp-exchange must be columns or sums, not 'all'"),
        ({"tp": 0}, "--tp must be positive, not 0"),
        ({"tp": 9, "pp": 9}, "81 ranks are more than the 64"),
    ],
)
def test_texts_that_are_no_partition(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(**options)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"tp": 4}, {}, "--tp 4: 4 ranks side by side, but the model has 3 key heads, and a rank needs one"),
        ({"tp": 2}, {"num_kv_heads": 1}, "2 ranks side by side, but the model has 1 key head, .* use .* stages"),
        ({"partition": "0;1&2"}, {"num_kv_heads": 1}, "--partition 0;1&2: 2 ranks side by side"),
        ({"tp": 3}, {"hidden_size": 32}, "hidden size 32 gives 2 pieces of 16, fewer than 3"),
        ({"tp": 3}, {"intermediate_size": 64}, "intermediate size 64 gives 2 pieces of 32, fewer than 3"),
        ({"tp": 3, "tp_exchange": "sums"}, {"intermediate_size": 64}, "--tp 3 --tp-exchange sums: 3 .* gives 2 pieces"),
        ({"pp": 7}, {}, "7 stages, but the model has 6 layers"),
        ({"partition": "0@0-2;1"}, {}, "give the layers of every stage, or of none"),
        ({"partition": "0@0-2;1@3-4"}, {}, "stages must have layers 0 to 5 in order, each once, as in 0@0-2;1@3-5"),
        ({"partition": "0@0-2;1@2-5"}, {}, "layers 0 to 5 in order"),
        ({"partition": "0@1-2;1@3-5"}, {}, "layers 0 to 5 in order"),
        ({"partition": "0@0-2;1@3-9999"}, {}, "layers 0 to 5 in order"),
    ],
)
def test_models_that_cannot_be_divided_so(options: dict[str, object], changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(**options).parts(replace(SMALL, **changes))


@given(
    stages=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    layers=st.integers(4, 9),
    heads=st.integers(3, 7),
    sizes=st.tuples(st.integers(6, 40), st.integers(3, 20), st.integers(60, 900)),
    fused=st.booleans(),
    gated=st.booleans(),
    sums=st.booleans(),
)
def test_every_weight_has_one_rank(
    stages: list[int], layers: int, heads: int, sizes: tuple[int, int, int], fused: bool, gated: bool, sums: bool
) -> None:
    """Weights of every linear, in every layer, are those of its stage's ranks together, once each; so are biases."""
    hidden, inner, vocab = sizes
    spec = ModelSpec(
        "x", layers, 8 * hidden, 32 * inner, 2 * heads, heads, 8, vocab, 64, 1e-5, fused=fused, gated=gated
    )
    numbers = iter(range(99))
    text = ";".join("&".join(str(next(numbers)) for _ in range(count)) for count in stages)
    exchange = "sums" if sums and max(stages) > 1 else "columns"
    specs = [RankSpec.of(spec, part) for part in of(partition=text, tp_exchange=exchange).parts(spec)]
    covered = []
    for stage in range(len(stages)):
        ranks = [own for own in specs if own.part.stage == stage]
        assert len({own.part.layers for own in ranks}) == 1
        covered += range(*ranks[0].part.layers)
        for index, site in enumerate(spec.sites()):
            for i, out in enumerate(site.out_features):
                held, biased = np.zeros((out, site.in_features), int), np.zeros(out, int)
                for own in ranks:
                    rows = own.own_outputs(index, i)
                    held[rows, own.own_inputs(index)] += 1
                    biased[rows] += own.adds_biases(index)
                assert (held == 1).all()
                assert (biased == 1).all()
        planned = pool_widths(specs).sites()
        assert all(
            own_out <= out
            for own in ranks
            for own_site, site in zip(own.sites(), planned, strict=True)
            for own_out, out in zip(own_site.out_features, site.out_features, strict=True)
        )
        assert all(
            own_site.in_features <= site.in_features
            for own in ranks
            for own_site, site in zip(own.sites(), planned, strict=True)
        )
    assert covered == list(range(layers))
