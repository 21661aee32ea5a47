"""Public ops of attention: paged attention, rotation, and reads and writes of KV pages; see `sgmv_kernels.ops`.

Shapes: T token rows, P pages, B sequences, D head dim, N rotated numbers of a head.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.backend_ops import BackendOps
from sgmv_kernels.checks import (
    check_masses,
    check_moves,
    check_pages,
    check_queries,
    check_rotated,
    check_sequences,
    check_trees,
    require,
)
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import Parents, build_trees
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses, plan_of
from sgmv_kernels.metadata.segments import Int32


class AttentionOps(BackendOps):
    """Compute attention over the pages of a pool. A plan is made once per step and is used for every layer.

    Args: as `BackendOps`.
    """

    def plan_attention(
        self,
        page_tables: Int32,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_size: int,
        num_pages: int,
        parents: Sequence[Parents] = (),
    ) -> AttentionPlan:
        """Check a step's sequences and lay them out, once for all layers.

        Args:
            page_tables: [B, max pages] int32 page ids in order; entries past a sequence's pages are ignored.
            query_lens: rows of each sequence; they are its last slots.
            kv_lens: keys of each sequence, including this step's.
            page_size: tokens of a page.
            num_pages: pages of the pool.
            parents: draft trees, in the last slots (`metadata.draft_trees`): one for each sequence, () for a sequence
                without; or empty if no sequence has a tree.
        Returns: the plan of all layers.
        Raises:
            KernelArgumentError: lengths that contradict each other, a page id outside the pool, or a tree of more than
                64 slots or with a parent after its child.
        """
        check_sequences(page_tables, query_lens, kv_lens, page_size, num_pages)
        tables = page_tables.copy()
        plan = plan_of(tables, query_lens, kv_lens, page_size, num_pages, self.device)
        if any(parents):
            check_trees(parents, kv_lens)
            plan = replace(plan, trees=build_trees(parents, np.diff(plan.query_starts), plan.kv_lens))
        return replace(plan, prepared=self._backend.prepare_attention(plan, self.device))

    def paged_attention(
        self,
        q: Tensor,
        kv: KvPages,
        plan: AttentionPlan,
        scoring: Scoring,
        masses: PageMasses | None = None,
    ) -> Tensor:
        """Compute causal attention of prefill chunks and single-token decodes in one call, over paged keys and values.

        Semantics: out[t] = softmax(cap(scale * q[t] . K[j]) + slope * (p(j) - p(t)), j seen by t) V; the position p of
        a draft token is that of its depth in the tree; a row sees the keys up to its own, of its draft tree only its
        ancestors and itself, and where given only those of the last `window` positions; cap(s) = softcap * tanh(s /
        softcap), or s; query head h reads key head h // (heads / kv_heads); a row that sees no key gives zeros

        Args:
            q: [T, heads, D] contiguous; the rows of sequence i follow those of i - 1. fp32 on the CPU.
            kv: one layer of the pool.
            plan: the step's sequences.
            scoring: scale, window, softcap and slopes.
            masses: the softmax weights of observed rows are added to it, by page; not with a window or slopes.
        Returns: [T, heads, D] in q's dtype.
        Raises:
            KernelArgumentError: shapes that do not fit, or a KV format that the kernels do not read.
        Source: paged KV of vLLM (Kwon et al. 2023); online softmax of FlashAttention-2 (Dao 2023); splits of keys of
            Flash-Decoding (Dao et al. 2023); draft trees of SpecInfer (Miao et al. 2024); ALiBi (Press et al. 2022).
        """
        self._check_activation(q, "q")
        check_queries(q, kv, scoring)
        check_masses(masses, kv, plan, scoring)
        require(plan.num_rows == q.shape[0], "query_lens must sum to the rows of q")
        self._check_pages(kv, plan)
        if masses is not None:
            self._backend.add_page_mass_(masses, q, kv, plan, scoring)
        return self._backend.attention(q, kv, plan, scoring)

    def rope_write_kv(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan) -> Tensor:
        """Rotate queries and keys, and store keys and values in their pages.

        Semantics: q, k, v = split(qkv); (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for every head of q and k, x1
        and x2 the halves of its first N numbers; k[t] and v[t] are stored at row t's place, in the pages' format

        Args:
            qkv: [T, (heads + 2 kv_heads) * D] contiguous, fp32 on the CPU. Undefined afterwards.
            cos, sin: [T, N / 2] fp32; N <= D, the other numbers of a head are not rotated.
            kv: one layer of the pool.
            plan: the step's sequences.
        Returns: q [T, heads, D], contiguous.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit, or a KV format that the kernels do not write.
        Source: rotary embedding (Su et al. 2021) in Hugging Face's half-split order.
        """
        return self._rotate(qkv, cos, sin, kv, plan, kv.num_heads)

    def rope_queries(self, q: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan) -> Tensor:
        """Rotate queries of a layer that reads the keys and values of another.

        Semantics: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for every head of q, x1 and x2 the halves of its first
        N numbers

        Args:
            q: [T, heads * D] contiguous, fp32 on the CPU. Undefined afterwards.
            kv: the pages that the queries will read; nothing is written. Others as `rope_write_kv`.
        Returns: q [T, heads, D], contiguous.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit, or a KV format that the kernels do not read.
        """
        return self._rotate(q, cos, sin, kv, plan, 0)

    def copy_slots(self, layers: Sequence[KvPages], moves: Int32) -> None:
        """Copy keys and values of single tokens, such as accepted drafts of a tree, to other slots, in all layers.

        Semantics: K[layer, target] = K[layer, source], and the same for V, one move after another

        Args:
            layers: all layers of a pool, in order.
            moves: [N, 4] int32: source page and its slot, target page and its slot.
        Raises:
            KernelArgumentError: a move outside the pages, a target that a later move reads, layers of different pools,
                or a KV format that the kernels do not write.
        """
        check_moves(layers, moves)
        self._check_format(layers[0])
        if len(moves):
            self._backend.copy_slots(layers, moves)

    def _rotate(
        self, rows: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan, kv_heads: int
    ) -> Tensor:
        self._check_activation(rows, "qkv")
        check_rotated(rows, cos, sin, kv.head_dim, kv_heads)
        self._check_pages(kv, plan)
        require(plan.num_rows == len(rows), "query_lens must sum to the rows of qkv")
        return self._backend.rope_write_kv(rows, cos, sin, kv, plan.write_pages, plan.write_slots, kv_heads)

    def _check_pages(self, kv: KvPages, plan: AttentionPlan) -> None:
        check_pages(kv, plan)
        self._check_format(kv)

    def _check_format(self, kv: KvPages) -> None:
        if not self._reads(kv.format):
            name = self._backend.name
            raise KernelArgumentError(f"kernels {name!r} do not read KV pages in format {kv.format.name!r}")

    def _reads(self, kv_format: KVFormat) -> bool:
        return self._backend.kv_formats is None or kv_format.name in self._backend.kv_formats
