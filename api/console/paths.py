"""List the exact paths of the console's files. They contain no data, and therefore need no key."""

STATIC_FILES = (
    "icon.svg",
    "base.css",
    "figures.css",
    "layout.css",
    "parts.css",
    "theme.js",
    "adapter_details.js",
    "adapter_row.js",
    "adapters.js",
    "api.js",
    "app.js",
    "chart.js",
    "charts.js",
    "confirm.js",
    "dom.js",
    "files.js",
    "format.js",
    "hash.js",
    "key.js",
    "lane.js",
    "ledger.js",
    "metrics.js",
    "pool_areas.js",
    "pool_map.js",
    "pool_owners.js",
    "pool_pages.js",
    "pulse.js",
    "sse.js",
    "summary.js",
    "try_it.js",
    "upload.js",
    "verdict.js",
)
"""Files of `static/` except for the page itself."""
CONSOLE_PATHS = ("/console", "/console/", *(f"/console/{name}" for name in STATIC_FILES))
"""Paths of the console: the page is at the first two, the others are its resources."""
