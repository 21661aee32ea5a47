"""Which drafters there are follows the options."""

from typing import Any

import pytest

from lorasrv.config import SpeculationOptions
from lorasrv.speculation.drafters import make_drafters, model_names

FREE = ["grammar", "prediction", "lookup", "corpus"]


@pytest.mark.parametrize(
    ("options", "drafters", "models"),
    [
        ({}, FREE, ["medusa"]),
        ({"speculation": "off"}, [], []),
        ({"drafters": ("lookup", "corpus")}, ["lookup", "corpus"], []),
        ({"drafters": ("medusa",)}, [], ["medusa"]),
        ({"corpus_bytes": 0}, FREE[:-1], ["medusa"]),
        ({"draft_head_bytes": 0}, FREE, []),
        ({"draft_head_bytes": 0, "draft_heads": "heads"}, FREE, ["medusa"]),
        (
            {"draft_model": "base", "draft_layers": 2, "lookahead": "5x4"},
            [*FREE, "lookahead"],
            ["medusa", "model", "layers"],
        ),
    ],
    ids=str,
)
def test_the_options_name_them(options: dict[str, Any], drafters: list[str], models: list[str]) -> None:
    given = SpeculationOptions(**options)
    assert [drafter.name for drafter in make_drafters(given)] == drafters
    assert model_names(given) == models
