"""A step in the queue of a GPU, whose tokens are not known on the host yet.

The next step may compute these tokens: they are copied on the device.

Source: planning a step while the previous one runs, SGLang's overlap scheduler and vLLM's asynchronous scheduling.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import ScheduledRequest
from sgmv_kernels.metadata.h2d import upload


class LaunchedStep:
    """Hold the sampled tokens on the device, and their copy on its way to the host.

    Args:
        sampled: requests of the step.
        tokens: [B] int64 of these requests; negative where a row's logits are not finite.
    """

    def __init__(self, sampled: Sequence[ScheduledRequest], tokens: Tensor) -> None:
        self._row = {s.request_id: row for row, s in enumerate(sampled)}
        self._tokens = tokens
        self._host = torch.empty(len(sampled), dtype=torch.int64, pin_memory=tokens.device.type == "cuda")
        self._host.copy_(tokens, non_blocking=True)
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_copied.record()

    def fill(self, token_ids: Tensor, pending: Sequence[tuple[int, RequestId]]) -> None:
        """Write this step's tokens in place of pending ones.

        Args:
            token_ids: tokens of the next step, int64 [at least T] on the device.
            pending: rows of the next step, each with the request of its token.
        """
        if pending:
            sources = np.array([self._row[request] for _, request in pending])
            at, row = upload([np.array([at for at, _ in pending]), sources], token_ids.device)
            # A request without a token fails when this step is read; until then the index must be valid.
            token_ids.index_copy_(0, at, self._tokens.index_select(0, row).clamp_(min=0))

    def wait(self) -> dict[RequestId, tuple[int, ...]]:
        """Wait for the tokens and return them by request, leaving out rows that are not finite."""
        self._is_copied.synchronize()
        tokens = self._host.tolist()
        return {request: (tokens[row],) for request, row in self._row.items() if tokens[row] >= 0}
