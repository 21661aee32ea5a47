"""Compile grammars in a worker process: `python -m lorasrv.text.structured_output.sandbox_worker`.

Reads frames from stdin (4 bytes of length, little-endian, then the content): first the vocabulary, then grammars.
Writes one line of JSON per frame: `{"error": null or text}`. A grammar that costs too much ends the process: by SIGPROF
when its CPU time is used up, by an abort when its memory is, by SIGSEGV when it nests too deeply.
"""

import json
import os
import random
import resource
import signal
import struct
import sys
import threading
import time

import llguidance

from lorasrv.text.structured_output.matcher import Vocabulary, compile_matcher, one_line

CPU_SECONDS = 0.6
MEMORY_BYTES = 320 << 20
# A quarter of the stack of the server's threads: a grammar that fits in here does not overflow there.
STACK_BYTES = 2 << 20
WALKS = 2
WALK_TOKENS = 64
WALK_SECONDS = 0.2


def main() -> None:
    vocabulary = Vocabulary.unpacked(_frame() or b"")
    tokenizer = vocabulary.build()
    threading.stack_size(STACK_BYTES)
    _limit_memory(MEMORY_BYTES)
    _say({"error": None})
    while (text := _frame()) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict: dict[str, object] = {}
        thread = threading.Thread(target=_examine, args=(tokenizer, set(vocabulary.ends), text.decode(), verdict))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(verdict)


def _examine(tokenizer: llguidance.LLTokenizer, ends: set[int], text: str, verdict: dict[str, object]) -> None:
    matcher = compile_matcher(tokenizer, text)
    matcher.compute_bitmask()  # a grammar without any sentence shows here
    error = matcher.get_error() or _walked(matcher, ends)
    verdict["error"] = one_line(error) if error else None


def _walked(matcher: llguidance.LLMatcher, ends: set[int]) -> str:
    """Follow random answers and return the first error: a small grammar may explode in use."""
    until = time.process_time() + WALK_SECONDS
    for number in range(WALKS):
        chance, walker = random.Random(number), matcher.deep_copy()
        for _ in range(WALK_TOKENS):
            token = _some_token(walker.compute_bitmask(), ends, chance)
            if walker.is_error():
                return walker.get_error()
            if token is None or time.process_time() > until:
                break
            if not walker.consume_token(token):
                return walker.get_error()
            if walker.is_stopped():
                break
    return ""


def _some_token(mask: bytes, ends: set[int], chance: random.Random) -> int | None:
    """Return a random allowed token that does not end the answer, or None."""
    begin = chance.randrange(len(mask))
    for at in (*range(begin, len(mask)), *range(begin)):
        if mask[at]:
            tokens: list[int] = [8 * at + bit for bit in range(8) if mask[at] >> bit & 1 and 8 * at + bit not in ends]
            if tokens:
                return tokens[chance.randrange(len(tokens))]
    return None


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its current size where the system reports it, and disable core
    files.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    except (OSError, ValueError):
        pass


def _frame() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    return sys.stdin.buffer.read(size)


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
