"""Engines whose logits are compared with PEFT's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from served_logits import ServedLogits


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedLogits]]:
    with ExitStack() as stack:
        yield lambda directory, **options: stack.enter_context(closing(ServedLogits(directory, monkeypatch, **options)))
