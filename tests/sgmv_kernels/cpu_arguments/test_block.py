"""Arguments of every CPU kernel: they fit into the block that a launch or a recording gives it."""

import pkgutil
from importlib import import_module

from sgmv_kernels import cpu_arguments
from sgmv_kernels.cpu_arguments.block import WORDS


def test_kernels_fit_their_block() -> None:
    """A longer one would reach into the counters of the next launch."""
    names = [own.name for own in pkgutil.iter_modules(cpu_arguments.__path__)]
    modules = [import_module(f"{cpu_arguments.__name__}.{name}") for name in names]
    counts = {module.__name__: module.NUM_ARGS for module in modules if hasattr(module, "NUM_ARGS")}
    assert len(counts) >= 8
    assert max(counts.values()) <= WORDS, counts
    assert 8 * WORDS == 256
