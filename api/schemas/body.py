"""What all bodies of generation have in common."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Strictly typed; NaN and infinity are no numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
