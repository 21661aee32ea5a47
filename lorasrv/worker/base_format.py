"""Choose the kernels and the weight format of a base."""

import logging

import torch

from lorasrv.config import ModelOptions
from lorasrv.errors import UnsupportedFormat
from lorasrv.models.loader import Checkpoint
from lorasrv.models.quantization import Fit, QuantFormat, StoredWeights, get_format, select_format
from lorasrv.models.quantization.fp8 import Fp8Format
from lorasrv.models.quantization.grouped import Int8Format
from lorasrv.models.spec import ModelSpec, operations
from lorasrv.worker.host_memory import free_bytes
from sgmv_kernels.formats.fp8 import multiplies_fp8
from sgmv_kernels.ops import Ops

logger = logging.getLogger(__name__)
PROBED_WIDTH = 2048
"""Width for which bf16 copies of linears were measured (`linear_autotune`); narrower models gain less."""
MAX_COPIES_SHARE = 0.2
"""Largest share of free memory for bf16 copies of the base's linears. A copy takes two bytes per weight, as many as a
token takes operations per weight. 4-bit weights grow to five times their size with a copy."""
_OWN_FORMAT = "--quantized-weights fixes format and group"


def choose_format(options: ModelOptions, checkpoint: Checkpoint, ops: Ops) -> QuantFormat:
    """Return the format to serve in; "auto" takes the one that fits the checkpoint best.

    Raises:
        UnsupportedFormat: the format or group is unknown, does not fit the model's linears, or differs from that of
            --quantized-weights.
    """
    asked = options.quantization
    if asked == Fp8Format.name and not multiplies_fp8(ops.device):
        logger.warning("--quantization fp8: %s multiplies no e4m3; weights are rounded to int8 instead", ops.device)
        asked = Int8Format.name
    name, accepted = select_format(StoredWeights.of(checkpoint), asked, options.quantization_group)
    if asked not in ("auto", name):
        logger.info("--quantization %s: served as %s", asked, name)
    if options.quantized_weights is not None and accepted.fit < Fit.EXACT:
        raise UnsupportedFormat(f"{_OWN_FORMAT}: leave out --quantization and --quantization-group")
    if accepted.fit == Fit.REFUSED:
        raise UnsupportedFormat(f"--quantization {name}: {accepted.reason}")
    return get_format(name, ops, accepted.group, keep_int8_codes=accepted.keep_int8_codes)


def make_ops(options: ModelOptions, spec: ModelSpec, device: torch.device) -> Ops:
    """Return the kernels that `options` name.

    Raises:
        KernelsUnavailable: they cannot run on this machine.
    """
    pays = spec.hidden_size >= PROBED_WIDTH and operations(spec).token <= MAX_COPIES_SHARE * free_bytes()
    copies = options.bf16_linears == "auto" and pays
    return Ops(device, None if options.kernels == "auto" else options.kernels, copies=copies)
