"""Declare the options of `serve` that divide a replica among processes; `ServerSettings` has them with all others."""

from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api.config.option_spec import OptionSpec
from lorasrv.config import PartitionOptions

_partition = partial(OptionSpec, panel="Partition")
_DEFAULTS = PartitionOptions()
_Ranks = Annotated[int, Field(ge=1)]


class PartitionSettings(BaseModel):
    """Hold the options that divide a replica."""

    partition: Annotated[
        str | None,
        _partition(
            "Processes that compute the model together: & joins ranks that share layers, ; precedes those with later "
            "layers, @ says which, as in 0&1@0-9;2@10-11",
            metavar="RANKS",
            default="one process",
        ),
    ] = _DEFAULTS.partition
    tp: Annotated[
        _Ranks,
        _partition("Processes that divide every layer's outputs (columns)", aliases=("tensor_parallel_size",)),
    ] = _DEFAULTS.tp
    pp: Annotated[
        _Ranks, _partition("Processes that divide the layers (stages)", aliases=("pipeline_parallel_size",))
    ] = _DEFAULTS.pp
    tp_exchange: Annotated[
        Literal["columns", "sums"],
        _partition(
            "What the processes of --tp exchange: columns of outputs, with the same answers to the bit, or partial "
            "sums, half as often, whose last bits differ"
        ),
    ] = "columns"
    cp: Annotated[_Ranks, _partition("Processes that divide the tokens of a step (rows); each has the whole model")] = (
        _DEFAULTS.cp
    )
