"""The double that stands for the engine in these tests has nothing that the engine has not."""

import ast
import inspect
import textwrap

import pytest
from fake_engine import FakeEngine

from lorasrv.engine.async_engine import AsyncEngine

NAMES = sorted(
    {name for name in (*dir(FakeEngine), *vars(FakeEngine())) if not name.startswith("_") and name.islower()}
    - FakeEngine.CONTROLS
    - FakeEngine.RECORDS
)


def real_names() -> set[str]:
    """What the class has, and what its `__init__` assigns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(AsyncEngine.__init__)))
    stored = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and type(node.ctx) is ast.Store}
    return {*dir(AsyncEngine), *stored}


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_has_it_too(name: str) -> None:
    assert name in real_names()
    if inspect.isfunction(double := getattr(FakeEngine, name, None)):
        real = getattr(AsyncEngine, name)
        assert inspect.signature(double).parameters == inspect.signature(real).parameters
        assert inspect.iscoroutinefunction(double) == inspect.iscoroutinefunction(real)
