"""Sums of the attention to each page on the CPU: `attention_loop`, with the weights of each page instead of values."""

from sgmv_kernels.cpu_arguments.attention import BLOCK, HEADS, KV_HEADS, OUT, PAGE, TABLE_WIDTH
from sgmv_kernels.cpu_arguments.page_mass import NUM_OBSERVED, OBSERVED
from sgmv_kernels.cpu_kernels.attention import STEPS
from sgmv_kernels.cpu_kernels.attention_loop import Steps, make_attention
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import row_sum
from sgmv_kernels.cpu_simd.memory_access import f32, i32, put_f32


def make_mass_steps(steps: Steps) -> Steps:
    """Return steps that compute scores as `steps` does, and whose sums are the weights of each page."""
    width_of = steps.width

    @kernel_part
    def sums_width(args):  # type: ignore[no-untyped-def]
        return max(width_of(args), args[TABLE_WIDTH])

    @kernel_part
    def collect(args, weights, units, sums, sequence, head, rows, at, first, stop, following):  # type: ignore[no-untyped-def]
        """Sum the weights of whole pages; weights from `stop` on are 0."""
        page, width = args[PAGE], sums_width(args)
        for i in range(rows):
            own = weights + 4 * args[BLOCK] * i
            for token in range(at, stop, page):
                put_f32(sums + 4 * width * i, token // page, row_sum(own + 4 * (token - at), page))

    @kernel_part
    def finish(args, sums, factor, row, head):  # type: ignore[no-untyped-def]
        """Add a row's sums of pages to those of its key head."""
        pages, kv_head = args[TABLE_WIDTH], head // (args[HEADS] // args[KV_HEADS])
        out = args[OUT] + 4 * pages * (kv_head * args[NUM_OBSERVED] + i32(args[OBSERVED], row))
        for page in range(pages):
            put_f32(out, page, f32(out, page) + f32(sums, page) * factor)

    return Steps(width_of, sums_width, steps.prepare, steps.score, collect, finish)


KERNELS = {name: make_attention(make_mass_steps(steps)) for name, steps in STEPS.items()}
