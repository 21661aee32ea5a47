"""Protocol and plain ASGI middleware: time and byte limits, strict JSON, multipart, SSE, draining."""
