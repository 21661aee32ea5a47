"""The fixtures of the engine's tests that make tiny models and adapters, for tests elsewhere: import them by name."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("engine_fixtures", Path(__file__).parents[1] / "lorasrv" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_FIXTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FIXTURES)

VOCAB: int = _FIXTURES.VOCAB
corpus, tiny_tokenizer_file = _FIXTURES.corpus, _FIXTURES.tiny_tokenizer_file
tiny_hf_checkpoints = _FIXTURES.tiny_hf_checkpoints
model, adapter_dirs = _FIXTURES.model, _FIXTURES.adapter_dirs
