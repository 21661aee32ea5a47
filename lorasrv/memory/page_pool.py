"""Page pool: reference counts of page ids, no memory. The only owner of which page is free.

KV takes single pages from the low end, adapters take runs from the high end; nothing is reserved for either. Two views
of the same free pages make both cheap, whatever the pool's size (the slab policy and boundary tags of memory
allocators, TLSF's classes of sizes):

- *superblocks* of 8 pages. A single page comes from the lowest superblock that is partly used, or else from the lowest
  one that is free, so that short-lived KV pages cluster and whole superblocks stay free for adapters.
- maximal *runs* of free pages, indexed by both ends and by length. A requested run is cut from the upper end of the
  shortest free run that is long enough.

No operation walks the pages: a page's neighbours determine how its run grows or shrinks. The bitmap of superblocks is
one integer (750 bytes for 48,000 pages).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sgmv_kernels.formats.adapter_panels import Run

SUPERBLOCK_PAGES = 8
_FULL = (1 << SUPERBLOCK_PAGES) - 1
_EXACT_LENGTHS = 64
_STEPS_PER_DOUBLING = 8


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Describe how scattered the free pages are."""

    free_runs: int
    longest_free_run: int


class PagePool:
    """Count the references of pages `first .. first + num_pages - 1`. Mutated by the engine thread only."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._num_free = num_pages
        self._reach = first
        self.first, self._end = first, first + num_pages
        self._refcounts = [0] * self._end
        self._runs = _FreeRuns()
        self._runs.add(first, self._end)
        # The first and the last superblock may have fewer pages than others; superblocks before the first have none.
        count, block = -(-self._end // SUPERBLOCK_PAGES), first // SUPERBLOCK_PAGES
        self._free_bits = [0] * block + [_FULL] * (count - block)
        self._free_bits[block] &= _FULL << first % SUPERBLOCK_PAGES
        self._free_bits[-1] &= _FULL >> -self._end % SUPERBLOCK_PAGES
        self._all_bits = tuple(self._free_bits)
        self._partial, self._whole = 0, (1 << count) - (1 << block)

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return self._num_free

    @property
    def reach(self) -> int:
        """Return the end of the pages that were ever taken singly; most pages before it have been taken."""
        return self._reach

    @property
    def fragmentation(self) -> Fragmentation:
        """Return how scattered the free pages are."""
        return Fragmentation(len(self._runs.ends), self._runs.longest())

    def allocate_singles(self, count: int) -> list[int] | None:
        """Take `count` pages, low and close together, with one reference each; return None if fewer are free."""
        if count > self._num_free:
            return None
        return [self._take_single() for _ in range(count)]

    def allocate_run(self, count: int) -> Run | None:
        """Take `count` consecutive pages out of the shortest free run that is long enough; return None if none is."""
        found = self._runs.find(count)
        if found is None:
            return None
        start, end = found
        self._cut(start, end, end - count, end)
        return (end - count, count)

    def free_runs(self) -> list[Run]:
        """Return every maximal run of free pages, in no order."""
        return [(start, end - start) for start, end in self._runs.ends.items()]

    def take_run(self, run: Run) -> None:
        """Take the lower part, or all, of a run that `free_runs` returned."""
        first, count = run
        end = self._runs.ends.get(first)
        assert end is not None, f"no free run begins at {first}"
        assert first + count <= end, f"run {run} is not free"
        self._cut(first, end, first, first + count)

    def take_page(self, page: int) -> None:
        """Take one given free page. Searches the free runs: for rare use."""
        start, end = next((start, end) for start, end in self._runs.ends.items() if start <= page < end)
        self._cut(start, end, page, page + 1)

    def refcount(self, page: int) -> int:
        """Return the number of references to a page; 0 if it is free."""
        return self._refcounts[page]

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free"
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; a page without references is free."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free already"
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                self._free(page)

    def move(self, moves: Mapping[int, int]) -> None:
        """Move the references of each page, old id -> new id; the new pages must be taken, the old ones become free."""
        for old, new in moves.items():
            assert self._refcounts[new] == 1, f"page {new} is not fresh"
            self._refcounts[new], self._refcounts[old] = self._refcounts[old], 0
            self._free(old)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Compare the counts with the references that owners hold.

        Args:
            references: page ids, each as often as an owner holds it.
        Raises:
            AssertionError: a count differs, or the two views of the free pages differ.
        """
        held = [0] * self._end
        for page in references:
            held[page] += 1
        wrong = [page for page, count in enumerate(self._refcounts) if count != held[page]]
        assert not wrong, f"pages with a wrong reference count: {wrong[:8]}"
        unused = [page for page in range(self.first, self._end) if not self._refcounts[page]]
        assert len(unused) == self._num_free, "free pages do not add up"
        bits = [
            block * SUPERBLOCK_PAGES + bit
            for block, mask in enumerate(self._free_bits)
            for bit in range(SUPERBLOCK_PAGES)
            if mask >> bit & 1
        ]
        assert bits == unused, "superblocks differ from the counts"
        masks = list(enumerate(zip(self._free_bits, self._all_bits, strict=True)))
        assert self._whole == sum(1 << block for block, (free, full) in masks if free == full != 0), "misfiled"
        assert self._partial == sum(1 << block for block, (free, full) in masks if 0 < free != full), "misfiled"
        assert sorted(self._runs.ends.items()) == _maximal_runs(unused), "free runs differ from the counts"
        self._runs.check_integrity()

    def _take_single(self) -> int:
        """Take the lowest free page next to a used one in a partly used superblock, else the first of a free one.

        The page is at an end of its run, so the run only gets shorter.
        """
        blocks = self._partial or self._whole
        block = (blocks & -blocks).bit_length() - 1
        free = self._free_bits[block]
        used = self._all_bits[block] & ~free
        beside = free & (used << 1 | used >> 1) or free
        page = block * SUPERBLOCK_PAGES + (beside & -beside).bit_length() - 1
        end = self._runs.ends.get(page)
        if end is not None:
            self._cut(page, end, page, page + 1)
        else:
            self._cut(self._runs.starts[page + 1], page + 1, page, page + 1)
        self._reach = max(self._reach, page + 1)
        return page

    def _cut(self, start: int, end: int, first: int, stop: int) -> None:
        """Take pages `first .. stop - 1` out of the free run `start .. end - 1`."""
        self._runs.remove(start, end)
        if start < first:
            self._runs.add(start, first)
        if stop < end:
            self._runs.add(stop, end)
        self._refcounts[first:stop] = [1] * (stop - first)
        self._num_free -= stop - first
        for block in range(first // SUPERBLOCK_PAGES, (stop - 1) // SUPERBLOCK_PAGES + 1):
            low = max(first - block * SUPERBLOCK_PAGES, 0)
            high = min(stop - block * SUPERBLOCK_PAGES, SUPERBLOCK_PAGES)
            self._set_bits(block, self._free_bits[block] & ~((1 << high) - (1 << low)))

    def _free(self, page: int) -> None:
        start, end = page, page + 1
        if (left := self._runs.starts.get(page)) is not None:
            self._runs.remove(left, page)
            start = left
        if (right := self._runs.ends.get(end)) is not None:
            self._runs.remove(end, right)
            end = right
        self._runs.add(start, end)
        self._num_free += 1
        block = page // SUPERBLOCK_PAGES
        self._set_bits(block, self._free_bits[block] | 1 << page % SUPERBLOCK_PAGES)

    def _set_bits(self, block: int, free: int) -> None:
        """Set a superblock's free pages. The bitmaps, which are as long as the pool, change only if the superblock
        changes between used, partly used and free."""
        was, self._free_bits[block], full = self._free_bits[block], free, self._all_bits[block]
        if (was == full) != (free == full):
            self._whole ^= 1 << block
        if (0 < was < full) != (0 < free < full):
            self._partial ^= 1 << block


class _FreeRuns:
    """Index maximal free runs by either end and by length."""

    def __init__(self) -> None:
        # start -> end (exclusive) of every run.
        self.ends: dict[int, int] = {}
        # end -> start of every run.
        self.starts: dict[int, int] = {}
        self._classes: list[dict[int, None]] = []
        self._used_classes = 0

    def add(self, start: int, end: int) -> None:
        self.ends[start] = end
        self.starts[end] = start
        length_class = _class_of(end - start)
        while len(self._classes) <= length_class:
            self._classes.append({})
        self._classes[length_class][start] = None
        self._used_classes |= 1 << length_class

    def remove(self, start: int, end: int) -> None:
        del self.ends[start], self.starts[end]
        length_class = _class_of(end - start)
        del self._classes[length_class][start]
        if not self._classes[length_class]:
            self._used_classes &= ~(1 << length_class)

    def find(self, length: int) -> tuple[int, int] | None:
        """Return (start, end) of a run of at least `length`, from the shortest class that has one; None if none has."""
        own = _class_of(length)
        longer = self._used_classes >> own
        while longer:
            offset = (longer & -longer).bit_length() - 1
            # Only the first class may hold runs that are too short, if it covers several lengths.
            for start in reversed(self._classes[own + offset]):
                if self.ends[start] - start >= length:
                    return start, self.ends[start]
            longer &= longer - 1
        return None

    def longest(self) -> int:
        top = self._classes[self._used_classes.bit_length() - 1] if self._used_classes else {}
        return max((self.ends[start] - start for start in top), default=0)

    def check_integrity(self) -> None:
        assert self.starts == {end: start for start, end in self.ends.items()}, "run ends differ"
        filed = {start: number for number, starts in enumerate(self._classes) for start in starts}
        assert filed == {start: _class_of(end - start) for start, end in self.ends.items()}, "a run is misfiled"
        used = sum(1 << number for number, starts in enumerate(self._classes) if starts)
        assert used == self._used_classes, "classes of lengths are misfiled"


def _class_of(length: int) -> int:
    """Return the class of a length: one class per length up to 63, eight per power of two above."""
    if length < _EXACT_LENGTHS:
        return length
    doublings = length.bit_length() - _EXACT_LENGTHS.bit_length()
    step = (length >> (length.bit_length() - 4)) & (_STEPS_PER_DOUBLING - 1)
    return _EXACT_LENGTHS + doublings * _STEPS_PER_DOUBLING + step


def _maximal_runs(free: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in free:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs
