"""What a token costs in arithmetic, by the shapes alone: multiplications and additions, each counted as one."""

from dataclasses import asdict, dataclass

from lorasrv.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Operations:
    """Of the linears of all layers for a token of prompt or answer; of the head for a token that is sampled; of
    attention for each token that a token looks back at, windows not regarded.
    """

    token: int
    sampled_token: int
    context_token: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def operations(spec: ModelSpec) -> Operations:
    """For one token of the base, without adapters."""
    weights = sum(site.in_features * sum(site.out_features) for site in spec.sites())
    return Operations(
        token=2 * spec.num_layers * weights,
        sampled_token=2 * spec.hidden_size * spec.vocab_size,
        context_token=4 * spec.num_layers * spec.q_width,
    )
