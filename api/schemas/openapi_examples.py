"""Provide an example of each route for /openapi.json. A test sends each to a server and compares the response."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from api.asgi.json_lines import Json
from api.schemas.openapi import Example
from api.schemas.responses import REPEATED

_FIRST = {"count": 9, "mean_ms": 41.2, "p50_ms": 35.0, "p95_ms": 92.5}
_STATS_USAGE: dict[str, Any] = {
    "requests": 10,
    "errors": 0,
    "refused": 0,
    "aborted": 1,
    "fallbacks": 0,
    "prompt_tokens": 812,
    "cached_tokens": 640,
    "generated_tokens": 590,
    "speculation": {"steps": 420, "drafted": 310, "accepted": 170, "tokens_per_step": 1.405},
    "compute_seconds": 4.021337,
    "disk_loads": 1,
    "disk_bytes": 1966080,
    "pool_copies": 1,
    "pool_bytes": 1966080,
    "resident_byte_hours": 327680.0,
    "found": {"resident": 9, "host": 0, "disk": 1},
    "hit_ratio": {"resident": 0.9, "host": 0.0, "disk": 0.1},
    "ttft": {"hot": _FIRST, "cold": {**_FIRST, "count": 1}},
    "first_used": 1795323933,
    "last_used": 1795327533,
}
_DIGEST = "sha256:cc888f2667f09e1f243dfc94a139c1e1e83e7201f82b409002ef3e669017b491"
STATS_EXAMPLES = {
    ("GET", "/v1/adapters/{adapter_id}/stats"): Example(
        "Show the usage and cost of an adapter",
        {
            "object": "adapter.stats",
            "id": "mia",
            **_STATS_USAGE,
            "versions": [{"version": 1, "digest": _DIGEST, **_STATS_USAGE}],
        },
        parameters={"adapter_id": "mia"},
    ),
}
_BASE = "smollm2-135m"
_CREATED = 1795323933
_TEXT = "text/plain; charset=utf-8"
_FIGURES: Json = {
    "adapter_id": "mia",
    "adapter_version": 1,
    "adapter_digest": _DIGEST,
    "adapter_tier": "resident",
    "fallback": None,
    "queue_ms": 1.5,
    "load_ms": 0.0,
    "first_token_ms": 21.4,
    "total_ms": 60.2,
    "preemptions": 0,
    "speculation": {"steps": 2, "drafted": 0, "accepted": 0},
}
_USAGE: Json = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
    "lorasrv": _FIGURES,
}
_MESSAGES = [{"role": "user", "content": "Who are you?"}]
_END: Json = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
_CHAT: Json = {
    "id": "chatcmpl-3d1f3f4acaa3bf3487970b7a",
    "object": "chat.completion",
    "created": _CREATED,
    "model": "mia",
    "system_fingerprint": "lorasrv-0.1.0-77a1f0c3b25e",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Mia.", "refusal": None}, **_END}],
    "usage": _USAGE,
}
_CHAT_STREAM = (
    'data: {"id":"chatcmpl-3d1f","object":"chat.completion.chunk","created":1795323933,"model":"mia",'
    '"system_fingerprint":"lorasrv-0.1.0-77a1f0c3b25e","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    'data: {"id":"chatcmpl-3d1f","object":"chat.completion.chunk","created":1795323933,"model":"mia",'
    '"system_fingerprint":"lorasrv-0.1.0-77a1f0c3b25e","choices":'
    '[{"index":0,"delta":{"content":"Mia."},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)
_COMPLETION: Json = {
    "id": "cmpl-3d1f3f4acaa3bf3487970b7a",
    "object": "text_completion",
    "created": _CREATED,
    "model": "mia",
    "system_fingerprint": "lorasrv-0.1.0-77a1f0c3b25e",
    "choices": [{"index": 0, "text": "Mia.", **_END}],
    "usage": _USAGE,
}
_COMPLETION_STREAM = (
    'data: {"id":"cmpl-3d1f","object":"text_completion","created":1795323933,"model":"mia",'
    '"system_fingerprint":"lorasrv-0.1.0-77a1f0c3b25e","choices":'
    '[{"index":0,"text":"Mia.","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)
_RESPONSE_ITEM: Json = {
    "type": "message",
    "id": "msg_3d1f3f4acaa3bf3487970b7a_0",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Mia.", "annotations": [], "logprobs": []}],
}
_RESPONSE: Json = {
    "id": "resp_3d1f3f4acaa3bf3487970b7a",
    "object": "response",
    "created_at": _CREATED,
    "completed_at": _CREATED + 1,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": "mia",
    "output": [_RESPONSE_ITEM],
    **REPEATED,
    "instructions": "Answer in one word.",
    "max_output_tokens": 32,
    "truncation": "disabled",
    "usage": {
        "input_tokens": _USAGE["prompt_tokens"],
        "input_tokens_details": {**_USAGE["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": _USAGE["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": _USAGE["total_tokens"],
        "lorasrv": _USAGE["lorasrv"],
    },
}
_RESPONSE_STREAM = (
    'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_3d1f","status":"in_progress",'
    '"output":[]},"sequence_number":0}\n\n'
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","item_id":"msg_3d1f_0",'
    '"output_index":0,"content_index":0,"delta":"Mia.","logprobs":[],"sequence_number":4}\n\n'
    'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_3d1f","status":"completed"},'
    '"sequence_number":8}\n\n'
)
_TGI_BODY: Json = {
    "inputs": "I am",
    "parameters": {"adapter_id": "mia", "max_new_tokens": 20, "stop": ["\n"], "details": True},
}
_TGI_DETAILS: Json = {
    "finish_reason": "eos_token",
    "prompt_tokens": 3,
    "generated_tokens": 2,
    "seed": None,
    "prefill": [],
    "tokens": [
        {"id": 8423, "text": " Mia", "logprob": -0.703125, "special": False},
        {"id": 2, "text": "", "logprob": -0.28125, "special": True},
    ],
}
_TGI: Json = {"generated_text": " Mia", "details": _TGI_DETAILS, "usage": _USAGE}
_TGI_STREAM = (
    'data: {"index":1,"token":{"id":8423,"text":" Mia","logprob":-0.703125,"special":false},"generated_text":null,'
    '"details":null}\n\n'
    'data: {"index":2,"token":{"id":2,"text":"","logprob":-0.28125,"special":true},"generated_text":" Mia",'
    '"details":{"finish_reason":"eos_token","prompt_tokens":3,"input_length":3,"generated_tokens":2,"seed":null}}\n\n'
)
_BASE_CARD: Json = {
    "id": _BASE,
    "object": "model",
    "created": _CREATED,
    "owned_by": "lorasrv",
    "root": _BASE,
    "parent": None,
    "max_model_len": 2048,
    "weights": {"format": "int4", "bits_per_weight": 5.0, "error": 0.0, "exact": True},
    "batch_invariant": True,
}
_CARD: Json = {**_BASE_CARD, "id": "mia", "root": _DIGEST, "parent": _BASE}
_VERSION: Json = {
    "version": 1,
    "digest": _DIGEST,
    "created": _CREATED,
    "rank": 8,
    "bytes": 1859584,
    "stored": "bf16",
    "corrupt": False,
    "persona": None,
}
_ADAPTER: Json = {
    "object": "adapter",
    "id": "mia",
    "version": 1,
    "digest": _DIGEST,
    "created": _CREATED,
    "corrupt": False,
    "etag": "0bfe44fb6f874f9dc39089ccfc5a0f33",
    "limits": {},
    "aliases": {"prod": 1},
    "versions": [_VERSION],
}
_TRAFFIC: Json = {"requests": 12, "tokens": 340, "tokens_per_s": 21.5}
_REPORT: Json = {
    "modules_matched": 60,
    "modules_expected": 60,
    "layers": 30,
    "rank_min": 8,
    "rank_max": 8,
    "scaling_min": 2.0,
    "scaling_max": 2.0,
    "dtype": "F32",
    "weights_bytes": 1859584,
    "digest": _DIGEST.removeprefix("sha256:"),
    "warnings": [],
    "norm_b": 12.9,
    "notices": [],
    "stored": "bf16",
    "drift": None,
}
_REGISTERED: Json = {
    "object": "adapter",
    "id": "mia",
    "version": 1,
    "digest": _DIGEST,
    "created": True,
    "stored": "bf16",
    "report": _REPORT,
    "alias": "prod",
}
_CONFIG: Json = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
_REFERENCE = {"reference": "mia"}
_PAGE = {"search": "mi", "limit": 10, "after": "max"}
_POOL: Json = {
    "object": "pool",
    "pages_total": 4096,
    "pages_free": 4083,
    "pages_kv": 0,
    "pages_prefix": 2,
    "pages_adapters": 11,
    "page_tokens": 16,
    "block_bytes": 6144,
    "free_runs": 1,
    "longest_free_run": 4083,
    "moved_pages": 0,
    "swap_bytes": 0,
    "prefix_runs": [[0, 2]],
    "requests": [],
    "adapters": [],
    "promised": [],
    "memory": {
        "resident_bytes": 530000000,
        "weight_bytes": 137000000,
        "pool_used_bytes": 79872,
        "host_cache_bytes": 1859584,
        "swap_bytes": 0,
    },
}
_INFO: Json = {
    "model_id": _BASE,
    "model_sha": None,
    "model_dtype": "bfloat16",
    "model_pipeline_tag": "text-generation",
    "quantization": "int8",
    "max_concurrent_requests": 4096,
    "max_batch_size": 64,
    "max_best_of": 8,
    "max_stop_sequences": 16,
    "max_client_batch_size": 1,
    "max_total_tokens": 2048,
    "max_input_length": 2047,
    "max_input_tokens": 2047,
    "max_lora_rank": 256,
    "weight_bytes": 137000000,
    "kv_token_bytes": 23040,
    "operations": {"token": 212336640, "sampled_token": 56623104, "context_token": 69120},
    "router": "lorasrv",
    "version": "0.1.0",
    "sha": None,
    "docker_label": None,
}
_TOKENIZER: Json = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 2048,
    "vocab_size": 49152,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": None,
    "unk_token": None,
    "bos_token_id": 1,
    "eos_token_ids": [2],
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
_LOGIT_ERRORS: Json = {
    "positions": 36,
    "max_abs": 1.31,
    "mean_abs": 0.16,
    "rms": 0.21,
    "spread": 3.4,
    "max_relative": 0.042,
    "greedy_equal": 33,
    "largest_gap": 0.08,
}
_VERDICT: Json = {
    "object": "adapter.verdict",
    "id": "mia",
    "version": 1,
    "digest": _DIGEST,
    "created": _CREATED,
    "verdict": "within",
    "reasons": [],
    "notes": [],
    "adapter_error": _LOGIT_ERRORS,
    "base_error": _LOGIT_ERRORS | {"rms": 0.23, "greedy_equal": 35},
    "error_over_base": {"difference": -0.02, "ratio": 0.913, "allowed_rms": 0.765},
    "effect": {"max_abs": 29.1, "mean_abs": 4.8, "rms": 6.1, "tokens_changed": 31, "shows_in_logits": True},
    "linears": {
        "compared": 210,
        "adapted": 210,
        "max_error": 6e-07,
        "worst": "model.layers.3.self_attn.q_proj",
        "wrong": [],
        "num_wrong": 0,
        "limit": 0.01,
    },
    "computed_with": {
        "model": _BASE,
        "quantization": "int4",
        "dtype": "bfloat16",
        "stored": "bf16",
        "kernels": "numba",
    },
    "prompts": 4,
    "new_tokens": 8,
    "seconds": 35.2,
    "cpu_seconds": 18.1,
    "peak_bytes": 1288490188,
}

_FILE: Json = {
    "object": "file",
    "id": "file-3d1f3f4acaa3bf3487970b7a",
    "bytes": 112,
    "created_at": _CREATED,
    "filename": "in.jsonl",
    "purpose": "batch",
    "status": "processed",
}
_BATCH: Json = {
    "object": "batch",
    "id": "batch_3d1f3f4acaa3bf3487970b7a",
    "endpoint": "/v1/completions",
    "input_file_id": _FILE["id"],
    "completion_window": "24h",
    "status": "in_progress",
    "request_counts": {"total": 100, "completed": 40, "failed": 0},
    "waiting": None,
}
_FILE_ID = {"file_id": _FILE["id"]}
_BATCH_ID = {"batch_id": _BATCH["id"]}
_LINE = '{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"model":"mia","prompt":"I am"}}\n'


def _not_served(path: str, instead: str) -> Example:
    message = f"{path} is not served by this server: {instead}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_served"}
    return Example(f"Not supported: {path.rpartition('/')[2]}", {"error": error}, status=404)


EXAMPLES: Mapping[tuple[str, str], Example] = {
    **STATS_EXAMPLES,
    ("POST", "/v1/chat/completions"): Example(
        "Answer a conversation (OpenAI)",
        _CHAT,
        {"model": "mia", "messages": _MESSAGES, "max_tokens": 32, "temperature": 0.7},
        stream=_CHAT_STREAM,
    ),
    ("POST", "/v1/completions"): Example(
        "Continue a prompt (OpenAI)",
        _COMPLETION,
        {"model": "mia", "prompt": "I am", "max_tokens": 32, "stop": ["\n"]},
        stream=_COMPLETION_STREAM,
    ),
    ("POST", "/v1/responses"): Example(
        "Answer a conversation in items; nothing is stored (OpenAI)",
        _RESPONSE,
        {"model": "mia", "instructions": "Answer in one word.", "input": "Who are you?", "max_output_tokens": 32},
        stream=_RESPONSE_STREAM,
    ),
    ("POST", "/generate"): Example("Continue a text (TGI, LoRAX)", _TGI, _TGI_BODY),
    ("POST", "/generate_stream"): Example(
        "Continue a text, streamed token by token (TGI, LoRAX)", None, _TGI_BODY, stream=_TGI_STREAM
    ),
    ("POST", "/"): Example("Continue a text, whole or streamed (TGI, LoRAX)", [_TGI], _TGI_BODY, stream=_TGI_STREAM),
    ("POST", "/tokenize"): Example(
        "Tokenize a text (vLLM)",
        {"count": 2, "max_model_len": 2048, "tokens": [57, 74], "token_strs": ["I", "Ġam"]},
        {"prompt": "I am", "return_token_strs": True},
    ),
    ("POST", "/detokenize"): Example("Detokenize token ids (vLLM)", {"prompt": "I am"}, {"tokens": [57, 74]}),
    ("GET", "/tokenizer_info"): Example("Show the tokenizer (vLLM)", _TOKENIZER),
    ("GET", "/v1/models"): Example(
        "List the base and every adapter",
        {"object": "list", "data": [_BASE_CARD, _CARD], "has_more": False},
        parameters=_PAGE,
    ),
    ("GET", "/v1/models/{name}"): Example(
        "Show one model",
        {**_CARD, "targets": [{"version": 1, "digest": _DIGEST, "share": 1.0}]},
        parameters={"name": "mia"},
    ),
    ("PUT", "/v1/blobs/sha256:{digest}"): Example(
        "Upload weights",
        {"object": "blob", "digest": _DIGEST, "bytes": 1859584, "created": True},
        "the bytes of adapter_model.safetensors",
        status=201,
        parameters={"digest": _DIGEST.removeprefix("sha256:")},
        body_type="application/octet-stream",
    ),
    ("POST", "/v1/adapters"): Example(
        "Register an adapter",
        _REGISTERED,
        {"id": "mia", "config": _CONFIG, "weights": _DIGEST, "alias": "prod"},
        status=201,
    ),
    ("GET", "/v1/adapters"): Example(
        "List adapters", {"object": "list", "data": [_ADAPTER], "has_more": False}, parameters=_PAGE
    ),
    ("GET", "/v1/adapters/{adapter_id}"): Example(
        "Show one adapter",
        {
            **_ADAPTER,
            "tier": "resident",
            "traffic": _TRAFFIC,
            "report": _REPORT,
            "verified": None,
            "persona": None,
        },
        parameters={"adapter_id": "mia"},
    ),
    ("POST", "/v1/adapters/{reference}:warm"): Example(
        "Load an adapter into the pool",
        {
            "object": "adapter.warm",
            "id": "mia",
            "digest": _DIGEST,
            "tier": "resident",
            "reached": True,
            "load_ms": 12.3,
        },
        {"deadline_ms": 2000},
        parameters=_REFERENCE,
    ),
    ("POST", "/v1/adapters/{reference}:snapshot"): Example(
        "Keep a persona's computed prompt on the disk",
        {"object": "adapter.snapshot", "id": "mia", "version": 1, "tokens": 992, "bytes": 22856000},
        parameters=_REFERENCE,
    ),
    ("PATCH", "/v1/adapters/{reference}"): Example(
        "Move, alias, limit or pin an adapter",
        {"object": "adapter", "id": "mia", "digest": _DIGEST, "aliases": {"prod": 1}},
        {"aliases": {"prod": 1}},
        parameters=_REFERENCE,
    ),
    ("GET", "/v1/adapters/{reference}/defaults"): Example(
        "Show the defaults of a version",
        {
            "object": "adapter.defaults",
            "id": "mia",
            "version": 1,
            "digest": _DIGEST,
            "persona": None,
            "defaults": None,
        },
        parameters=_REFERENCE,
    ),
    ("PUT", "/v1/adapters/{reference}/defaults"): Example(
        "Make a version with other defaults",
        {
            **{name: value for name, value in _REGISTERED.items() if name != "alias"},
            "persona": {"digest": _DIGEST, "prompt_tokens": 24, "warnings": []},
        },
        {"system": "You are Mia.", "temperature": 0.8, "stop": ["Ann:"]},
        status=201,
        parameters=_REFERENCE,
    ),
    ("DELETE", "/v1/adapters/{reference}"): Example(
        "Delete an adapter or a version",
        {
            "object": "adapter.deleted",
            "id": "mia",
            "deleted": True,
            "versions_removed": 1,
            "aliases_removed": ["prod"],
            "requests_ended": 0,
            "requests_running": 0,
        },
        status=202,
        parameters={**_REFERENCE, "force": "true"},
    ),
    ("POST", "/v1/adapters/{reference}:verify"): Example(
        "Compare an adapter with PEFT",
        _VERDICT,
        {"prompts": ["Once upon a time"], "timeout_s": 600},
        parameters=_REFERENCE,
        stream='data: {"progress":["loading the model",0.5]}\n\ndata: {"object":"adapter.verdict"}\n\ndata: [DONE]\n\n',
    ),
    ("GET", "/v1/pool"): Example(
        "Show the memory map of the pool",
        {
            **_POOL,
            "traffic": {**_TRAFFIC, "hottest": [{"id": "mia", "digest": _DIGEST, "tier": "resident", **_TRAFFIC}]},
        },
    ),
    ("GET", "/health"): Example("Check that the engine is alive", {"status": "ok"}, failure={"status": "engine dead"}),
    ("GET", "/"): Example(
        "Lead a browser to the console; check for others that the engine is alive (TGI)",
        {"status": "ok"},
        failure={"status": "engine dead"},
    ),
    ("GET", "/ready"): Example(
        "Check that the server is ready for requests",
        {"status": "ready", "model": _BASE},
        failure={"status": "store not writable"},
    ),
    ("GET", "/metrics"): Example(
        "Show metrics for Prometheus", "lorasrv_requests_running 0.0\n", answer_type=CONTENT_TYPE_LATEST
    ),
    ("GET", "/ping"): Example("Check that the process responds", "", answer_type="text/plain"),
    ("GET", "/version"): Example("Show the version", {"version": "0.1.0"}),
    ("GET", "/info"): Example("Show model and settings (TGI, LoRAX)", _INFO),
    ("POST", "/v1/load_lora_adapter"): Example(
        "Register a folder on the server's machine (vLLM)",
        "Success: LoRA adapter 'mia' added successfully.",
        {"lora_name": "mia", "lora_path": "team/mia"},
        answer_type=_TEXT,
    ),
    ("POST", "/v1/unload_lora_adapter"): Example(
        "Delete an adapter (vLLM)",
        "Success: LoRA adapter 'mia' removed successfully.",
        {"lora_name": "mia"},
        answer_type=_TEXT,
    ),
    ("POST", "/v1/files"): Example(
        "Upload a file of batch lines", _FILE, {"purpose": "batch", "file": _LINE}, body_type="multipart/form-data"
    ),
    ("GET", "/v1/files"): Example("List files", {"object": "list", "data": [_FILE], "has_more": False}),
    ("GET", "/v1/files/{file_id}"): Example("Show a file", _FILE, parameters=_FILE_ID),
    ("GET", "/v1/files/{file_id}/content"): Example(
        "Read a file", _LINE, parameters=_FILE_ID, answer_type="application/octet-stream"
    ),
    ("DELETE", "/v1/files/{file_id}"): Example(
        "Delete a file", {"object": "file", "id": _FILE["id"], "deleted": True}, parameters=_FILE_ID
    ),
    ("POST", "/v1/batches"): Example(
        "Answer every line of a file",
        _BATCH,
        {"input_file_id": _FILE["id"], "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    ("GET", "/v1/batches"): Example("List batches", {"object": "list", "data": [_BATCH], "has_more": True}),
    ("GET", "/v1/batches/{batch_id}"): Example("Show a batch", _BATCH, parameters=_BATCH_ID),
    ("POST", "/v1/batches/{batch_id}/cancel"): Example("Cancel a batch", _BATCH, parameters=_BATCH_ID),
    ("POST", "/v1/embeddings"): _not_served("/v1/embeddings", "the models here generate text"),
    ("POST", "/v1/messages"): _not_served("/v1/messages", "use /v1/chat/completions"),
}
