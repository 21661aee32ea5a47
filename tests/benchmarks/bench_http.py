"""Measure what a streamed token costs the server's HTTP thread: text, JSON, chunks, and the socket.

    python tests/benchmarks/bench_http.py --streams 1,16,32 [--chat] [--versus ../old-checkout --pairs 3]

Streams of two lengths run at once; the difference of the thread's processor time, divided by the difference in tokens,
is the cost of a token without that of a request. The client reads sockets and parses nothing. What the thread does
itself, without the kernel's work for it, is the interpreter's share.
"""

import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from harness import Server, arguments, lorasrv_server, row, table, versus
from served import ROOT

SHORT, LONG = 16, 144


def thread_s(pid: int) -> tuple[float, float]:
    """Return the processor seconds of a process's main thread, which runs the event loop, and those of user mode."""
    seconds = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    user = int(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11])
    return seconds, user / os.sysconf("SC_CLK_TCK")


async def stream(server: Server, number: int, tokens: int, chat: bool) -> int:
    """Read one streamed answer to its end; return its number of events."""
    prompt = f"{number} {tokens} once upon a time"
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = json.dumps({"model": server.base_name, **content, "max_tokens": tokens, "ignore_eos": True, "stream": True})
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = await reader.read(-1)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    return answer.count(b"data: ") - 1


async def streams_s(server: Server, count: int, tokens: int, chat: bool) -> tuple[float, float]:
    """Return the HTTP thread's seconds for `count` streams at once, and those of user mode."""
    before = thread_s(server.pid)
    await asyncio.gather(*(stream(server, number, tokens, chat) for number in range(count)))
    seconds, user_s = (now - then for now, then in zip(thread_s(server.pid), before, strict=True))
    return seconds, user_s


def token_us(server: Server, count: int, chat: bool, rounds: int) -> tuple[float, float]:
    """Return the microseconds of a streamed token when `count` streams run at once, and those of user mode."""

    async def difference() -> tuple[float, float]:
        short, long = [await streams_s(server, count, tokens, chat) for tokens in (SHORT, LONG)]
        return long[0] - short[0], long[1] - short[1]

    asyncio.run(difference())
    runs = [asyncio.run(difference()) for _ in range(rounds)]
    # Time in user mode is counted in ticks: the mean of all runs, not one of them.
    seconds, user_s = statistics.median(run[0] for run in runs), statistics.fmean(run[1] for run in runs)
    tokens = count * (LONG - SHORT)
    return 1e6 * seconds / tokens, 1e6 * user_s / tokens


def main() -> None:
    a = arguments(
        __doc__,
        streams=((1, 16, 32), "streams at once"),
        chat=(False, "/v1/chat/completions in place of /v1/completions"),
        versus=(Path, "another checkout of this project, measured alternately"),
        pairs=(3, "runs of each checkout"),
        rounds=(3, "measured differences of each load"),
    )

    def measure(root: Path) -> dict[str, float]:
        with (
            tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder,
            lorasrv_server(Path(folder) / "store", root=root) as served,
        ):
            figures = dict[str, float]()
            for count in a.streams:
                whole, user = token_us(served, count, a.chat, a.rounds)
                figures |= {f"{count} streams: µs a token": whole, f"{count} streams: of them in user mode": user}
            return figures

    if a.versus:
        versus(a.versus.resolve(), a.pairs, measure)
    else:
        table(("load", "µs"))
        for name, value in measure(ROOT).items():
            row(name, value)


if __name__ == "__main__":
    main()
