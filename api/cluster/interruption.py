"""End a start at SIGINT or SIGTERM by an exception, so that everything already started is ended and removed.

A handler's exception surfaces wherever the main thread is: an extension module may turn it into another error, and a
destructor drops it. The signal is therefore remembered, too.
"""

import atexit
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar, cast

from api.early_stop import ignore_signals

Called = TypeVar("Called", bound=Callable[..., Any])


class Interruption:
    """Remember which signal has ended the start; for the main thread."""

    def __init__(self) -> None:
        self.number: int | None = None

    def remember(self, number: int) -> None:
        """Remember a signal; the first one counts."""
        self.number = self.number or number

    def handle(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt.
        """
        self.remember(number)
        raise KeyboardInterrupt

    def install(self) -> None:
        """Handle both signals from now on."""
        atexit.register(ignore_signals)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def only_remember(self) -> None:
        """Remember signals without raising from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.remember(number))

    def check(self) -> None:
        """Raise if a signal was remembered, since its first exception may have been dropped.

        Raises:
            KeyboardInterrupt.
        """
        if self.number is not None:
            raise KeyboardInterrupt

    def checking(self, function: Called) -> Called:
        """Return a function that calls `check`, then `function`."""

        def checked(*arguments: Any) -> Any:
            self.check()
            return function(*arguments)

        return cast(Called, checked)

    @contextmanager
    def instead_of_errors(self) -> Iterator[None]:
        """End the block without an error if a signal ended it, whatever error its exception was turned into."""
        report = sys.unraisablehook

        def report_others(dropped: Any) -> None:
            if self.number is None:
                report(dropped)

        sys.unraisablehook = report_others
        try:
            yield
        except SystemExit:
            # Raised by Ray's own SIGTERM handler, which is active until `install` is called again.
            self.remember(signal.SIGTERM)
        except BaseException:
            if self.number is None:
                raise
        finally:
            sys.unraisablehook = report
