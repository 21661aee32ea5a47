"""An adapter's own rows of the vocabulary: the rows of its file that differ from the base's.

A row of a trained copy is the base's if it has the same floats as the base's file or as the served base. PEFT also
saves the base's table beside LoRA on it, without training it. Such a row counts as the base's, too, if it differs from
the served quantized row by no more than rounding may: an adapter fits any quantization of the base that it was trained
on. Own rows are served as in the file, in the adapter dtype.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.formats.weights import AdapterWeights, Array
from adapter_store.spec import VocabRows
from adapter_store.validation.vocab_rows import MAX_ROW_BYTES
from lorasrv.models.lora_sites import HEAD, TokenIds
from lorasrv.worker.weights import ONE_AT_A_TIME, ModelWeights, row_prints

ROUNDING = 0.1
"""Largest relative difference between a row of a quantized base and its original: 4 bits change rows of normally
distributed numbers by 7.6 % in groups of 32, 8 bits by 0.5 %."""
CHUNK_ROWS = 4096


def own_tokens(base: ModelWeights, adapter: AdapterWeights, dtype: torch.dtype) -> tuple[TokenIds, TokenIds]:
    """Return the tokens for which the adapter has its own rows, in the head and in the embedding, ascending.

    Raises:
        AdapterInvalid: the rows take too many bytes.
    """
    embedding = base.spec.names.embedding
    head, embedded = (_own_tokens(base, adapter, module, dtype) for module in (HEAD, embedding))
    nbytes = (len(head) + len(embedded)) * base.spec.hidden_size * dtype.itemsize
    if nbytes > MAX_ROW_BYTES:
        message = (
            f"{len(head) + len(embedded)} rows differ from the base's: {nbytes} bytes; {MAX_ROW_BYTES} are the most"
        )
        raise AdapterInvalid((Problem("own_rows_too_large", embedding, message),))
    return head, embedded


def rows_of(adapter: AdapterWeights, module: str, tokens: TokenIds) -> Array:
    """Return the adapter's own rows [N, H] of these tokens, in the dtype of its file."""
    parts = [(own, rows) for own, rows in zip(adapter.spec.rows, adapter.rows, strict=True) if own.module == module]
    found: Array | None = None
    for own, rows in parts:
        if own.token_ids is None:
            found = rows[tokens]
            continue
        ids = np.array(own.token_ids)
        order = np.argsort(ids)
        at = np.minimum(np.searchsorted(ids, tokens, sorter=order), len(ids) - 1)
        is_own = ids[order[at]] == tokens
        if found is None:
            found = np.zeros((len(tokens), rows.shape[1]), dtype=rows.dtype)
        elif found.dtype != rows.dtype:
            found, rows = _floats(found).numpy(), _floats(rows).numpy()
        found[is_own] = rows[order[at[is_own]]]
    assert found is not None, f"{module} has no rows"
    return found


def _own_tokens(base: ModelWeights, adapter: AdapterWeights, module: str, dtype: torch.dtype) -> TokenIds:
    known = base.spec.vocab_size
    is_own = np.zeros(max(known, adapter.spec.vocab_size), dtype=np.bool_)
    is_own[known:] = True
    for own, rows in zip(adapter.spec.rows, adapter.rows, strict=True):
        if own.module == module:
            if own.token_ids is None:
                tokens, rows = np.arange(min(len(rows), known)), rows[:known]
            else:
                tokens = np.array(own.token_ids)
                tokens, rows = tokens[tokens < known], rows[tokens < known]
            with ONE_AT_A_TIME:
                differ = list(_differ(base, own, tokens, rows, dtype))
            is_own[tokens] = np.concatenate([np.zeros(0, dtype=np.bool_), *differ])
    return np.flatnonzero(is_own)


@torch.inference_mode()
def _differ(
    base: ModelWeights, own: VocabRows, tokens: TokenIds, rows: Array, dtype: torch.dtype
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield, chunk by chunk, whether each row differs from the base's."""
    is_head = own.module == HEAD and not base.spec.tied_head
    rows_of_base = base.head.rows if is_head else base.embed
    prints = base.row_prints.get(HEAD if is_head else base.spec.names.embedding)
    device = base.final_norm.device
    for start in range(0, len(rows), CHUNK_ROWS):
        saved = _floats(rows[start : start + CHUNK_ROWS]).to(device)
        ids = torch.from_numpy(tokens[start : start + CHUNK_ROWS]).to(device)
        served = rows_of_base(ids)
        same = (saved == served).all(1) | (saved.to(dtype) == served).all(1)
        if prints is not None:
            same |= row_prints(saved) == prints[ids]
        if own.frozen and not base.has_float_tables:
            same |= torch.linalg.norm(saved - served, dim=1) <= ROUNDING * torch.linalg.norm(saved, dim=1)
        yield ~same.cpu().numpy()


def _floats(array: Array) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).float()
