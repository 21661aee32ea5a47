"""Derive the modules that the store validates, and the sites of the kernels, from a `ModelSpec`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from adapter_store.spec import INT8, AdapterSpec, BaseShapes
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.formats.adapter_panels import CODE_BYTES, AdapterLayout, LayerRanks, SiteDims

if TYPE_CHECKING:
    from lorasrv.models.loader.checkpoint import Checkpoint


def base_shapes(spec: ModelSpec, name: str = "", checkpoint: str = "") -> BaseShapes:
    """Return every linear module of a layer with its (in, out), for validation in `adapter_store`.

    Args:
        spec: the base model.
        name: served name of the base.
        checkpoint: name of its file or folder (`checkpoint_name`); an adapter trained on another gets a warning.
    """
    modules = {
        module: (site.in_features, out)
        for site in spec.sites()
        for module, out in zip(site.modules, site.out_features, strict=True)
    }
    found = {(layer, m) for layer in range(spec.num_layers) for site in spec.sites_of(layer) for m in site.modules}
    return BaseShapes(
        family=spec.family,
        num_layers=spec.num_layers,
        modules=modules,
        lacking=frozenset((layer, m) for layer in range(spec.num_layers) for m in modules) - found,
        layer_prefix=spec.names.layers,
        name=name,
        checkpoint=checkpoint,
    )


def base_sample(checkpoint: "Checkpoint") -> list[float]:
    """Return numbers that identify the base in a store, whatever its quantization: the weights of the last norm.

    Every file of a model has them in floating point, and known methods do not fold anything into them: those that scale
    a linear's inputs (AWQ) use the norms inside the layers.
    """
    norm = checkpoint.tensor("model.norm.weight").float()
    values: list[float] = (norm + 1 if checkpoint.spec.norms_less_one else norm).tolist()
    return values


def site_dims(spec: ModelSpec) -> tuple[SiteDims, ...]:
    """Return the linear sites of a layer as the kernels describe them."""
    return tuple(SiteDims(site.in_features, site.out_features) for site in spec.sites())


def adapter_layout(spec: ModelSpec, adapter: AdapterSpec, itemsize: int) -> AdapterLayout:
    """Return the layout of a validated adapter in the pool, from its ranks and form alone, before weights are read.

    Args:
        itemsize: bytes of a weight in the adapter dtype.
    """
    ranks = {(m.layer, m.module): m.rank for m in adapter.modules}
    size = CODE_BYTES if adapter.stored == INT8 else itemsize
    return _layout(spec, lambda layer, module: ranks.get((layer, module), 0), size)


def full_layout(spec: ModelSpec, rank: int, itemsize: int) -> AdapterLayout:
    """Return the layout of an adapter that has the same rank on every linear."""
    return _layout(spec, lambda layer, module: rank, itemsize)


def _layout(spec: ModelSpec, rank_of: Callable[[int, str], int], itemsize: int) -> AdapterLayout:
    """Return a layout from the ranks of (layer, module)."""

    def layer_ranks(layer: int) -> LayerRanks:
        own = spec.site_indices(layer)
        return tuple(
            tuple(rank_of(layer, module) if index in own else 0 for module in site.modules)
            for index, site in enumerate(spec.sites())
        )

    ranks = tuple(layer_ranks(layer) for layer in range(spec.num_layers))
    return AdapterLayout(site_dims(spec), ranks, itemsize, spec.kv_slabs)
