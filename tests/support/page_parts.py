"""Markdown tables, and the generated parts of pages between `<!-- generated: NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Iterable, Mapping


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return "\n".join([head, "|" + "---|" * len(titles), *lines])


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with its generated parts replaced; it must have each part once."""
    for name, text in parts.items():
        pattern = rf"(<!-- generated: {re.escape(name)} -->\n).*?(<!-- end -->)"

        def filled(found: re.Match[str], text: str = text) -> str:
            return f"{found[1]}{text}\n{found[2]}"

        page, count = re.subn(pattern, filled, page, flags=re.DOTALL)
        assert count == 1, f"the page has {count} parts {name}"
    return page
