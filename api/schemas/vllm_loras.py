"""Bodies of vLLM's two routes for adapters at run time. What vLLM sends beside these fields changes nothing here."""

from pydantic import BaseModel, ConfigDict


class LoadBody(BaseModel):
    """`load_inplace`: an id that is taken gets a new version."""

    model_config = ConfigDict(strict=True)

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """The id to forget, with all its versions."""

    model_config = ConfigDict(strict=True)

    lora_name: str
