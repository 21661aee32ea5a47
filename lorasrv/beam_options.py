"""What a client says about beam search."""

from dataclasses import dataclass

from lorasrv.errors import InvalidRequest

MAX_BEAMS = 8
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """`width` beams. Scores are divided by length to the power of `length_penalty`. `early_stopping` True ends with
    `width` whole answers, False when no beam is likely to beat them, "never" when none can.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAMS:
            raise InvalidRequest(f"best_of must be between 1 and {MAX_BEAMS} beams", param="best_of")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
                param="length_penalty",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest('early_stopping must be true, false or "never"', param="early_stopping")
