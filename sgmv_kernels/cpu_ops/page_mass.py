"""CPU launcher of the sums of attention to each page: tasks of `cpu_ops.attention` for observed rows only."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.cpu_arguments.attention import KEY_SCALES, KEYS, OUT, PAGE_BYTES, SCALE, SOFTCAP, Q
from sgmv_kernels.cpu_arguments.page_mass import NUM_OBSERVED, OBSERVED
from sgmv_kernels.cpu_ops.attention import ENTRIES, CpuSequences, tasks_part
from sgmv_kernels.cpu_runtime.launch import Part, launch
from sgmv_kernels.formats import kv_format as formats
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses

MODULE, PART = "page_mass", "page mass"


def add_page_mass_cpu_(masses: PageMasses, q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> None:
    """See `ops.Ops.paged_attention`."""
    own = {
        Q: q.data_ptr(),
        KEYS: kv.keys.data_ptr(),
        PAGE_BYTES: kv.page_bytes,
        SCALE: np.float64(scoring.scale).view(np.int64).item(),
        SOFTCAP: np.float64(scoring.softcap or 0.0).view(np.int64).item(),
        KEY_SCALES: kv.address(formats.KEY_SCALES),
    }
    launch(MODULE, ENTRIES[kv.format.name], masses_part(masses, plan, q.shape[1], kv.num_heads, kv.head_dim), own)


def masses_part(masses: PageMasses, plan: AttentionPlan, heads: int, kv_heads: int, dim: int) -> Part:
    """Return a step's launch arguments for its observed rows."""
    shape = heads, kv_heads, dim
    if shape not in masses.prepared:
        masses.prepared[shape] = _part(masses, plan, *shape)
    part: Part = masses.prepared[shape][0]
    return part


def _part(masses: PageMasses, plan: AttentionPlan, heads: int, kv_heads: int, dim: int) -> tuple[Part, object]:
    """Return the launch arguments, and the table that they point to."""
    sequences: CpuSequences = plan.prepared
    begins = sequences.query_lens - masses.counts
    part = tasks_part(plan, sequences, begins, (heads, kv_heads, dim), plan.page_tables.shape[1])
    rows = np.arange(plan.num_rows)
    is_observed = rows >= np.repeat(plan.query_starts[1:] - masses.counts, sequences.query_lens)
    observed = (np.cumsum(is_observed) - 1).astype(np.int32)
    own = {OUT: masses.sums.data_ptr(), OBSERVED: observed.ctypes.data, NUM_OBSERVED: masses.sums.shape[1]}
    return replace(part, name=PART, words={**part.words, **own}), observed
