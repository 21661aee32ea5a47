"""A clock that advances only when a test sets it."""


class Clock:
    """Callable as `time.monotonic` is; `now` is what it returns."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
