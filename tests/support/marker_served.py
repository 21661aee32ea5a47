"""The marker model behind a server: its tokens have texts, so that any route's answer shows which adapter made it.

`markers.py` makes the model and describes what it detects. Here token (topic, i, j) has the text ` t3.12.5`; lower ids
are the 256 bytes, one token each and never merged, so that the tokens of a text prompt are known without a request. For
the same reason, the chat template is only the content of the messages.
"""

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import httpx2
import markers as m
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PAGE_TOKENS = 16
PAGE_BYTES = 2 * m.KV_HEADS * m.HEAD_DIM * PAGE_TOKENS * 4 * m.LAYERS
"""Bytes of a page of this model's pool: keys and values of all layers in float32."""
_SPELLED = re.compile(r" t(\d+)\.(\d+)\.(\d+)")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def write_served_model(folder: Path) -> Path:
    """Write a Hugging Face directory for `lorasrv serve --model`; needs `--dtype float32 --quantization none`."""
    m.write_model(folder, _tokenizer().to_str().encode())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


SERVE_FLAGS = ("--served-model-name", "marked", "--dtype", "float32", "--quantization", "none")


def pool_bytes(residents: int, requests: int, tokens: int) -> int:
    """Return the bytes of a pool for about `residents` adapters and the keys and values of `requests` requests of
    `tokens` tokens.
    """
    return PAGE_BYTES * (residents * 4 + requests * -(-tokens // PAGE_TOKENS))


def host_cache_bytes(adapters: int) -> int:
    """Return the bytes of a cache for about `adapters` packed adapters of all varieties."""
    return adapters * 20 * 1024


@dataclass(frozen=True)
class Prompt:
    """A text, its token ids, and the topics that its answer may have."""

    text: str
    ids: tuple[int, ...]
    topics: frozenset[int]


def some_prompt(rng: random.Random, prefixes: Sequence[str] = (), longest: int = 80) -> Prompt:
    """Return text of one topic, sometimes after one of the prefixes, which share pages and have their own topics."""
    text = rng.choice(prefixes) if prefixes and rng.random() < 0.5 else ""
    return prompt_of(text + some_text(rng, rng.randint(1, max(1, longest - len(text)))))


def some_text(rng: random.Random, count: int) -> str:
    topic = rng.randrange(m.TOPICS)
    letters = [letter for letter in _LETTERS if m.topic_of(_ids()[letter]) == topic]
    return "".join(rng.choice(letters) for _ in range(count))


def prompt_of(text: str) -> Prompt:
    ids = tuple(_ids()[letter] for letter in text)
    return Prompt(text, ids, frozenset(map(m.topic_of, ids)))


def said_in(text: str) -> list[m.Said]:
    """Return the tokens of an answer.

    Raises:
        AssertionError: it contains something else.
    """
    found = _SPELLED.findall(text)
    assert "".join(" t{}.{}.{}".format(*one) for one in found) == text, f"no adapter says {text!r}"
    return [m.Said(int(topic), m.Marker(int(i), int(j))) for topic, i, j in found]


@lru_cache(maxsize=512)
def adapter_files(number: int, variety: int) -> tuple[dict[str, object], bytes]:
    """Return adapter_config.json and adapter_model.safetensors of an adapter that forces marker `number`."""
    with tempfile.TemporaryDirectory() as folder:
        made = m.write_adapter(Path(folder) / "one", number, m.VARIETIES[variety])
        config = json.loads((made / "adapter_config.json").read_text())
        return config, (made / "adapter_model.safetensors").read_bytes()


async def upload(http: httpx2.AsyncClient, name: str, number: int, variety: int, **fields: object) -> tuple[int, str]:
    """Upload an adapter; return the (version, digest) that the server gives it."""
    config, weights = adapter_files(number, variety)
    digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
    put = await http.put(f"/v1/blobs/{digest}", content=weights)
    assert put.status_code in (200, 201), f"{put.status_code}: {put.text}"
    body = {"id": name, "config": config, "weights": digest, **fields}
    done = await http.post("/v1/adapters", json=body)
    assert done.status_code in (200, 201), f"{done.status_code}: {done.text}"
    return done.json()["version"], done.json()["digest"]


def _tokenizer() -> Backend:
    backend = Backend(models.BPE(vocab=_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


@lru_cache(maxsize=1)
def _vocabulary() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet]
    tokens += [f"Ġnever{i}" for i in range(len(tokens), m.OFFSET)]
    for token in range(m.OFFSET, m.VOCAB):
        said = m.said_by(token)
        assert said is not None
        tokens.append(f"Ġt{said.topic}.{said.marker.i}.{said.marker.j}")
    return {token: number for number, token in enumerate(tokens)}


def _ids() -> dict[str, int]:
    return _vocabulary()
