"""Compile Triton kernels for GPUs that the machine need not have, and read the code that ptxas generates.

Under `compiling(arch)`, launches compile instead of running; the triton wheel includes ptxas and cuobjdump.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WARP = 32
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_PRODUCT = re.compile(r"\b[A-Z]+MMA\b")
_CALL = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")


@dataclass(frozen=True)
class Facts:
    """Facts about one kernel from ptxas and cuobjdump. The bytes of a copy are those of one thread's instruction."""

    kernel: str
    label: str
    registers: int
    # Instructions that write to, or read from, local memory, and how many of them are in the longest loop.
    spills: int
    loop_spills: int
    shared: int
    # Instructions of the longest loop, and how many of them wait for the other warps.
    loop: int
    barriers: int
    # Bytes of the narrowest copy into shared memory; None if there is no such copy.
    copy_bytes: int | None
    # Loads in a loop of products whose result is used before the next product, so that an instruction waits for memory.
    waits: int
    # Loops whose next iteration may overwrite registers that a product still reads.
    races: int

    def __str__(self) -> str:
        return (
            f"{self.label} {self.kernel}: {self.registers} registers, {self.spills} spills, "
            f"{self.loop_spills} of them in its loop, {self.shared} B shared, "
            f"copies of {self.copy_bytes} B; in its loop of {self.loop} {self.barriers} barriers, {self.waits} waits, "
            f"{self.races} races"
        )


class Compiler:
    """Replacement of `JITFunction.run`; `facts` has an entry for each compiled kernel."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)
        self.label = ""
        self.facts: list[Facts] = []
        self._seen: set[Any] = set()

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Compile with the rules of `JITFunction.run`: 1 becomes a constant, multiples of 16 are known as such."""
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {name: v for name, v in options.items() if name in names}
        signature, constants, attrs = {}, {}, {}
        for i, name in enumerate(names):
            value, plain = values[name], not kernel.params[i].do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name], attrs[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
            elif kernel.params[i].is_constexpr or (plain and type(value) is int and value == 1):
                signature[name], constants[i,] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if plain and value % 16 == 0:
                    attrs[i,] = [["tt.divisibility", 16]]
        launched = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options}
        key = (kernel.__name__, str(signature), str(constants), str(attrs), str(launched))
        if key not in self._seen:
            self._seen.add(key)
            made = triton.compile(ASTSource(kernel, signature, constants, attrs), target=self._target, options=launched)
            self.facts.append(facts_of(kernel.__name__, self.label, made))


@contextmanager
def compiling(arch: int) -> Iterator[Compiler]:
    """Compile launches for a GPU of this compute capability, 90 for sm90."""
    compiler = Compiler(arch)

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        compiler.launch(kernel, *args, **options)

    with mock.patch.object(triton.JITFunction, "run", run):
        yield compiler


def facts_of(kernel: str, label: str, made: Any) -> Facts:
    """Read the facts of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used = _dump("--dump-resource-usage", file.name)
        code = [(int(at, 16), text) for at, text in _CALL.findall(_dump("--dump-sass", file.name))]
    loop = longest_loop(code)
    copies = [width_of(text) for _, text in code if "LDGSTS" in text]
    return Facts(
        kernel,
        label,
        int(re.findall(r"REG:(\d+)", used)[0]),
        num_spills(text for _, text in code),
        num_spills(loop),
        made.metadata.shared,
        len(loop),
        sum("BAR.SYNC" in text for text in loop),
        min(copies, default=None),
        waits_of(loop),
        races_of(made.asm["ttgir"]),
    )


def races_of(ttgir: str) -> int:
    """Return the number of loops that do not wait, at their end, for a product with an operand in registers."""
    races, is_running = 0, False
    for line in ttgir.splitlines():
        if "warp_group_dot_wait" in line:
            is_running = is_running and "pendings = 0" not in line
        elif "warp_group_dot " in line and "isAsync = true" in line and "dot_op" in line:
            is_running = True
        elif "scf.yield" in line:
            races += is_running
    return races


def num_spills(code: Iterable[str]) -> int:
    """Return the number of instructions that write to, or read from, local memory."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in code)


def longest_loop(code: list[tuple[int, str]]) -> list[str]:
    """Return the instructions of the longest backward branch."""
    place = {at: i for i, (at, _) in enumerate(code)}
    best: list[str] = []
    for i, (_, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        start = place.get(int(target[1], 16), i) if target else i
        if i - start > len(best):
            best = [text for _, text in code[start : i + 1]]
    return best


def waits_of(loop: list[str]) -> int:
    """Return the number of loads of a loop without a product between the load and the first use of its result."""
    waits = 0
    if not any(map(_PRODUCT.search, loop)):
        return waits
    for i, text in enumerate(loop):
        made = re.search(r"\bLDG\b\S* R(\d+),", text)
        if made:
            first = int(made[1])
            loaded = range(first, first + max(1, width_of(text) // 4))
            after = loop[i + 1 :] + loop[: i + 1]
            use = next(j for j, later in enumerate(after) if any(r in loaded for r in registers_of(later)))
            waits += not any(map(_PRODUCT.search, after[:use]))
    return waits


def registers_of(text: str) -> set[int]:
    """Return the registers that an instruction names; `R2.64` means two."""
    named = re.findall(r"\bR(\d+)(\.64)?", text)
    return {int(number) + more for number, pair in named for more in range(2 if pair else 1)}


def width_of(text: str) -> int:
    """Return the bytes that a memory instruction moves for a thread."""
    bits = re.search(r"\.(8|16|32|64|128)\b|\.[US](8|16)\b", text.split()[0] if text[0] != "@" else text.split()[1])
    return int(next(filter(None, bits.groups()))) // 8 if bits else 4


def _dump(what: str, path: str) -> str:
    return subprocess.run([CUOBJDUMP, what, path], capture_output=True, text=True, check=True).stdout
