"""The base model as adapters see it: the bridge between `ModelSpec`, the store's validation and the kernels' layout."""

from adapter_store.spec import AdapterSpec, BaseShapes
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.layout import AdapterLayout, LayerRanks, SiteDims


def base_shapes(spec: ModelSpec, name: str = "") -> BaseShapes:
    """Every linear module of a layer with its (in, out), for `adapter_store` to validate against.

    `name` is what the base is called; an adapter that says it was trained on another gets a warning.
    """
    modules = {
        module: (site.in_features, out)
        for site in spec.sites()
        for module, out in zip(site.modules, site.out_features, strict=True)
    }
    return BaseShapes(family=spec.family, num_layers=spec.num_layers, modules=modules, name=name)


def site_dims(spec: ModelSpec) -> tuple[SiteDims, ...]:
    return tuple(SiteDims(site.in_features, site.out_features) for site in spec.sites())


def adapter_layout(spec: ModelSpec, adapter: AdapterSpec, itemsize: int) -> AdapterLayout:
    """How a validated adapter will lie in the pool; known from its ranks alone, before any weight is read."""
    ranks = {(m.layer, m.module): m.rank for m in adapter.modules}
    sites = spec.sites()

    def layer_ranks(layer: int) -> LayerRanks:
        return tuple(tuple(ranks.get((layer, module), 0) for module in site.modules) for site in sites)

    return AdapterLayout(site_dims(spec), tuple(layer_ranks(layer) for layer in range(spec.num_layers)), itemsize)
