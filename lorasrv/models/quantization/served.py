"""Describe what became of the weights of a checkpoint that was quantized already."""

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
    # Linears of layers that the file has as codes: kept, and made from dequantized weights.
    kept: int = 0
    remade: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether every quantized linear of a layer has the values that the file gives."""
        return self.remade == 0 and (self.packing is None or not self.packing.rounding)

    def line(self) -> str:
        """Describe a quantized file and its use in one line; "" for other files."""
        if self.packing is None:
            return ""
        bits = " and ".join(f"{bits:g}" for bits in self.packing.bits)
        what = f"weights: {self.packing.method}, {bits} bits, {self.kept + self.remade} linears"
        if self.is_exact:
            return f"{what}: kept exactly as the file has them (--quantization {self.format})"
        if not self.remade:
            return f"{what}: {self.packing.rounding} (--quantization {self.format})"
        return (
            f"{what}: {self.remade} of them dequantized and stored as {self.format}, which adds an error of rounding "
            "to the file's; --quantization auto keeps them"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON data."""
        if self.packing is None:
            return {"format": self.format}
        found = self.packing
        return {"format": self.format, "method": found.method, "bits": list(found.bits), "exact": self.is_exact}
