"""Sums of the attention to each page in plain torch, one query row at a time, so that rows do not affect each other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses
from sgmv_kernels.torch_ops.pointwise import softcap_torch_


def add_page_mass_torch_(masses: PageMasses, q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> None:
    """See `ops.Ops.paged_attention`."""
    at = 0
    group = q.shape[1] // kv.num_heads
    for sequence, count in enumerate(masses.counts.tolist()):
        if not count:
            continue
        length, end = int(plan.kv_lens[sequence]), int(plan.query_starts[sequence + 1])
        num_pages = -(-length // plan.page_size)
        table = torch.from_numpy(plan.page_tables[sequence, :num_pages]).to(q.device, torch.int64)
        keys = kv.read(table[None])[0].permute(0, 2, 3, 1, 4).flatten(3)[0]
        for behind in range(count, 0, -1):
            row = q[end - behind].float().view(kv.num_heads, group, -1)
            scores = (row @ keys[..., : length - behind + 1]).mul_(scoring.scale)
            if scoring.softcap is not None:
                softcap_torch_(scores, scoring.softcap)
            weights = F.pad(scores.softmax(-1).sum(1), (0, num_pages * plan.page_size - length + behind - 1))
            masses.sums[:, at, :num_pages] += weights.view(-1, num_pages, plan.page_size).sum(-1)
            at += 1
