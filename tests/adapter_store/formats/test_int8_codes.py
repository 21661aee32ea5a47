"""Matrices as int8 codes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adapter_store.formats.int8_codes import CodedTensors, round_rows
from adapter_store.formats.weights import LoraTensors

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=FINITE))
def test_any_row_is_within_half_a_step(rows: np.ndarray) -> None:
    codes, scales = round_rows(rows)
    assert codes.dtype == np.int8
    assert scales.dtype == np.float32
    largest = np.abs(rows).max(axis=1)
    assert (np.abs(codes.astype(int)).max(axis=1) == np.where(scales > 0, 127, 0)).all()
    error = np.abs(codes * scales.astype(np.float64)[:, None] - rows)
    # Rows whose scale would not be a normal number become zeros.
    assert (error.max(axis=1) <= np.where(scales > 0, 0.5001 * scales.astype(np.float64), 1.5e-36)).all()
    assert (largest[scales > 0] <= 127.001 * scales[scales > 0].astype(np.float64)).all()


def test_every_rank_row_has_a_scale_of_its_own_and_one_factor() -> None:
    generator = np.random.default_rng(0)
    a = (generator.standard_normal((3, 40)) * [[1e-3], [1], [1e3]]).astype(np.float32)
    b = (generator.standard_normal((50, 3)) * [1e2, 1, 1e-2]).astype(np.float32)
    coded = CodedTensors(LoraTensors(3, 1.5, a, b), "F32")
    kept_a, kept_b = coded.dequantized()
    for kept, matrix in ((kept_a, a), (kept_b.T, b.T)):
        assert (np.linalg.norm(kept - matrix, axis=1) < 0.02 * np.linalg.norm(matrix, axis=1)).all()
    product = (coded.b.T * coded.factors) @ coded.a.astype(np.float32)
    np.testing.assert_allclose(product, 1.5 * kept_b @ kept_a, rtol=1e-4, atol=1e-3)
