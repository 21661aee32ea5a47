"""A watermark as an option: how strong it is, and whose. `green_list` puts it into logits and finds it in text."""

from dataclasses import dataclass, field

from lorasrv.errors import ConfigError

DEFAULT_KEY = 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """`gamma` of all tokens are green, each gets `delta` added to its logit; only who has the `key` can look for it.

    Raises:
        ConfigError: a value is out of range; names the option.
    """

    gamma: float = 0.5
    delta: float = 2.0
    key: int = field(default=DEFAULT_KEY, repr=False)

    def __post_init__(self) -> None:
        if not 0.01 <= self.gamma <= 0.99:
            raise ConfigError(f"--watermark-gamma must be between 0.01 and 0.99, not {self.gamma}")
        if not 0.0 < self.delta <= 100.0:
            raise ConfigError(f"--watermark-delta must be above 0 and at most 100, not {self.delta}")
        if not 0 <= self.key < 2**64:
            raise ConfigError("--watermark-key must be an integer from 0 to 2^64 - 1")
