"""Read uploaded tokenizers in processes of their own, `python -m lorasrv.text.uploaded_tokenizers`.

Parsing a tokenizer.json of many megabytes holds Python's lock for most of a second, in which no stream would go on.

The process reads a line of JSON (`_Question`), the base's tokenizer.json, and the uploaded one up to the end. It writes
the tokens that the uploaded one adds, or the problems with it, as JSON.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from adapter_store.errors import AdapterInvalid, Problem
from lorasrv.errors import EngineOverloaded
from lorasrv.fair_lock import FairLock
from lorasrv.text.own_tokenizers import BaseTokens, added_tokens
from lorasrv.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
COMMAND = (sys.executable, "-P", "-m", "lorasrv.text.uploaded_tokenizers")
WALL_SECONDS = 60.0
MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Question:
    """Describe what follows in the process's input."""

    base_bytes: int
    special: list[str]
    is_exact: bool


class UploadedTokenizers:
    """Read one uploaded tokenizer at a time; keys take turns. For the event loop's thread."""

    def __init__(self) -> None:
        self._turns = FairLock("uploaded tokenizers", MAX_WAITING)

    async def added_tokens(self, read: Callable[[], bytes], base: Tokenizer, principal: str) -> list[dict[str, Any]]:
        """Return the tokens that a tokenizer.json has beyond the base's, as it describes them.

        Args:
            read: returns the tokenizer.json. Called in a thread when it is its turn, so that only one is in memory.

        Raises:
            AdapterInvalid: it is no extension of the base's tokenizer; says what differs.
            EngineOverloaded: the process does not start, was ended from outside, or got no CPU time for the answer.
            Exception: whatever `read` raises.
        """
        async with self._turns.turn(principal):
            text = await asyncio.to_thread(read)
            known = await asyncio.to_thread(BaseTokens.of, base)
            head = _Question(len(known.text), sorted(known.all_special), known.is_exact)
            said = await _asked(b"".join((json.dumps(asdict(head)).encode(), b"\n", known.text, text)))
        if (problems := said["problems"]) is not None:
            raise AdapterInvalid(tuple(Problem(**problem) for problem in problems))
        tokens: list[dict[str, Any]] = said["tokens"]
        return tokens


async def _asked(question: bytes) -> dict[str, Any]:
    """Run a process with this input, and return what it says."""
    pipe = asyncio.subprocess.PIPE
    try:
        # In a session of its own: Ctrl-C in the server's terminal is for the server, which answers its requests first.
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError:
        raise _too_busy() from None
    try:
        async with asyncio.timeout(WALL_SECONDS):
            answer, last_words = await process.communicate(question)
    except TimeoutError:
        raise _too_busy() from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        _LOG.warning("reading a tokenizer: exit code %d; %s", process.returncode, last_words.decode(errors="replace"))
        raise _too_busy()
    said: dict[str, Any] = json.loads(answer)
    return said


def _too_busy() -> EngineOverloaded:
    why = "the tokenizer cannot be read now: this machine may be short of memory or CPU time"
    return EngineOverloaded(f"{why}; upload it and register again", retry_after_s=5.0)


def main() -> None:
    asked = _Question(**json.loads(sys.stdin.buffer.readline()))
    base = BaseTokens(sys.stdin.buffer.read(asked.base_bytes), frozenset(asked.special), is_exact=asked.is_exact)
    said: dict[str, Any] = {"tokens": None, "problems": None}
    try:
        said["tokens"] = added_tokens(sys.stdin.buffer.read(), base)
    except AdapterInvalid as refused:
        said["problems"] = [problem.to_dict() for problem in refused.problems]
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
