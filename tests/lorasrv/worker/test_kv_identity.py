"""What keys and values depend on: files of the base that were edited, and the sources that make adapters' weights."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lorasrv.config import ModelOptions
from lorasrv.worker.kv_identity import source_files, weight_stamps


@pytest.mark.parametrize("edited", ["base", "quantized"])
def test_a_file_that_is_edited_in_place_is_another_base(
    tiny_hf_checkpoints: dict[str, Callable[..., Path]], tmp_path: Path, edited: str
) -> None:
    folder, quantized = tiny_hf_checkpoints["llama"](), tmp_path / "codes.safetensors"
    quantized.write_bytes(b"codes")
    options = ModelOptions(model=str(folder), quantized_weights=quantized)
    before = weight_stamps(options)
    assert before == weight_stamps(options)
    path = quantized if edited == "quantized" else next(folder.glob("*.safetensors"))
    kept = path.stat().st_mtime_ns
    try:
        os.utime(path, ns=(kept, kept + 1000))
        assert weight_stamps(options) != before
    finally:
        os.utime(path, ns=(kept, kept))
    assert weight_stamps(ModelOptions(model="anything", load_format="dummy")) == []


def test_sources_of_adapters_count() -> None:
    names = {name for name, _ in source_files()}
    assert {"adapter_store.formats/int8_codes.py", "adapter_store.composition/composition.py"} <= names
    assert {"lorasrv.worker/decoder.py", "sgmv_kernels/ops.py"} <= names
