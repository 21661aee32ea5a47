"""Describe the weights of a base as they are served, compared with those of its checkpoint."""

from dataclasses import dataclass
from typing import Any

from lorasrv.models.loader.checkpoint import StoredPacking


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Hold the format that a base is served in, and how that differs from the file."""

    # Value of --quantization.
    format: str
    # None for a file of floats, or GGUF.
    packing: StoredPacking | None = None
    # Numbers of layers' linears that the file has as codes: kept as codes, and made from dequantized weights.
    kept: int = 0
    remade: int = 0
    # Mean bits of a weight of the layers' linears in memory, with scales.
    bits_per_weight: float = 0.0
    # Change of these weights by the format: root mean square of the change over that of the weights.
    error: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Return whether the linears of the layers have exactly the file's values."""
        return self.error == 0.0

    def line(self) -> str:
        """Describe a quantized file and its use in one line; "" for other files."""
        if self.packing is None:
            return ""
        bits = " and ".join(f"{bits:g}" for bits in self.packing.bits)
        what = f"weights: {self.packing.method}, {bits} bits, {self.kept + self.remade} linears"
        if self.is_exact:
            return f"{what}: kept exactly as the file has them (--quantization {self.format})"
        if self.remade:
            return (
                f"{what}: {self.remade} of them dequantized and stored as {self.format}, which adds an error of "
                "rounding to the file's; --quantization auto keeps them"
            )
        change = self.packing.rounding or "linears that the file has as floats are held in --dtype"
        return f"{what}: {change} (--quantization {self.format})"

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON data."""
        stored = {} if self.packing is None else {"method": self.packing.method, "bits": list(self.packing.bits)}
        served = {"bits_per_weight": round(self.bits_per_weight, 2), "error": float(f"{self.error:.2g}")}
        return {"format": self.format, **stored, **served, "exact": self.is_exact}
