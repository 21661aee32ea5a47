"""Where the console's files are: exact paths. They hold no data, so that they are open without a key."""

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
    "metrics.js",
    "pool_drawing.js",
    "pool_map.js",
    "pool_owners.js",
    "pulse.js",
    "sse.js",
    "summary.js",
    "try_it.js",
    "upload.js",
)
"""All files of `static/` but the page itself."""
CONSOLE_PATHS = ("/console", "/console/", *(f"/console/{name}" for name in STATIC_FILES))
"""Every path of the console. The page is at the first two, everything else is what it loads."""
