"""Suggest what a flag or a command that does not exist probably means."""

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

MOST = 3
"""Most names suggested: a longer list to search is what --help is for."""
EQUAL, SIMILAR, RELATED = 1.0, 0.75, 1 / 3
ELSEWHERE: Mapping[str, str] = {
    # vLLM
    "--data-parallel-size": "Use --replicas",
    "--max-log-len": "Texts of requests are logged with --log-prompts only",
    "--generation-config": "The defaults of sampling are a persona's: lorasrv defaults ID FILE",
    "--override-generation-config": "The defaults of sampling are a persona's: lorasrv defaults ID FILE",
    "--no-enable-chunked-prefill": "Prompts are always computed in chunks; --max-num-batched-tokens bounds a step",
    "--chat-template": "The template is the one in the model's folder",
    "--kv-cache-memory-bytes": "Use --pool-bytes",
    "--speculative-config": "Drafts need no other model; see --speculation, --drafters and --draft-model",
    "--num-gpu-blocks-override": "Use --pool-bytes",
    "--ssl-keyfile": "The server speaks plain HTTP: put a TLS proxy in front",
    "--ssl-certfile": "The server speaks plain HTTP: put a TLS proxy in front",
    "--max-logprobs": "The limits of log-probabilities are fixed: 20, and 5 for logprobs of /v1/completions",
    "--guided-decoding-backend": "There is one implementation of grammars",
    "--structured-outputs-config": "There is one implementation of grammars",
    "--tokenizer": "The tokenizer is the one in the model's folder",
    "--lora-extra-vocab-size": "An adapter brings its own tokens, and nothing is reserved for them",
    # SGLang
    "--model-path": "Use --model",
    "--lora-paths": "Use --lora-modules",
    "--lora-target-modules": "Each adapter has its own target modules, and nothing is reserved for them",
    "--max-loras-per-batch": "There is no limit: a batch may hold any number of adapters",
    "--max-loaded-loras": "Use --host-cache-bytes; other adapters are loaded from disk",
    "--lora-backend": "Use --kernels",
    "--mem-fraction-static": "Use --pool-bytes or --gpu-memory-utilization",
    "--context-length": "Use --max-model-len",
    "--max-running-requests": "Use --max-num-seqs",
    "--max-queued-requests": "Use --max-num-queued-seqs",
    "--chunked-prefill-size": "Use --max-num-batched-tokens",
    "--schedule-policy": "Use --scheduling-policy",
    "--disable-radix-cache": "Use --no-enable-prefix-caching",
    "--tp-size": "Use --tp",
    "--pp-size": "Use --pp",
    "--dp-size": "Use --replicas",
    # LoRAX, TGI
    "--model-id": "Use --model",
    "--hostname": "Use --host",
    "--num-shard": "Use --tp",
    "--adapter-memory-fraction": "Use --adapter-pool-fraction, for a fixed split only",
    "--max-active-adapters": "There is no limit: a batch may hold any number of adapters",
    "--adapter-cycle-time-s": "Adapters do not take turns; --scheduling-policy fair shares the machine among them",
    "--max-concurrent-requests": "Use --max-num-queued-seqs",
    "--max-total-tokens": "Use --max-model-len",
    "--max-batch-prefill-tokens": "Use --max-num-batched-tokens",
    "--max-batch-total-tokens": "Use --pool-bytes",
}
"""Option of another server -> what to use for `serve`, or why there is none. docs/migrating.md lists them all."""
_WHOLE_WORD = re.compile(r"\w+")
"""Word of a help text. `fallback_base` is one word, which `base` does not match."""


def meant(word: str, known: Mapping[str, str]) -> list[str]:
    """Return the names that a word may mean: similar ones, else those with common words, else those whose help has it.

    Args:
        known: name -> its help.
    """
    bare = _words(word)
    for score, least in ((_alike, EQUAL), (_alike, SIMILAR), (_related, RELATED)):
        scored = sorted(((score(bare, _words(name)), name) for name in known), key=lambda pair: -pair[0])
        if found := [name for points, name in scored if points >= least]:
            return found[:MOST]
    mentioned = [
        name for name, text in known.items() if any(_is_begun(bare, word) for word in _WHOLE_WORD.findall(text.lower()))
    ]
    return mentioned if len(mentioned) <= MOST else []


def options_of(context: Any) -> dict[str, str]:
    """Return a command's long flags, including aliases, with their help."""
    return {
        flag: f"{param.metavar or ''} {param.help or ''}"
        for param in context.command.get_params(context)
        if not getattr(param, "hidden", False) or (param.help or "").startswith("Same as ")
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }


def commands_of(group: Any) -> dict[str, str]:
    """Return all commands below a group, as they are typed, with their help."""
    return {typed: command.help or "" for typed, command in _below(group)}


def owners_of(flag: str, group: Any) -> list[str]:
    """Return the commands below a group that have an option, as they are typed; none if there are more than `MOST`."""
    owners = [typed for typed, command in _below(group) if any(flag in param.opts for param in command.params)]
    return owners if len(owners) <= MOST else []


def _below(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield prefix + name, command
        if hasattr(command, "commands"):
            yield from _below(command, f"{prefix}{name} ")


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _alike(left: list[str], right: list[str]) -> float:
    return SequenceMatcher(None, "-".join(left), "-".join(right)).ratio()


def _related(left: list[str], right: list[str]) -> float:
    """Return the share of common words. If the left side is a single word, it may be the beginning of a right one."""
    shared = sum(any(one == other or _is_begun([one], other) for other in right) for one in left)
    return shared / max(1, len(left) + len(right) - shared)


def _is_begun(bare: list[str], word: str) -> bool:
    return len(bare) == 1 and len(bare[0]) > 2 and word.startswith(bare[0])
