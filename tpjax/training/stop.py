# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: asked once, a run ends in order; asked twice, at once."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A context in which SIGINT and SIGTERM are noted, for the loop to see between two steps.

    The second one interrupts what is running, as Python does by itself.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that came, None before."""
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The signal's name, "SIGINT"; empty where none came."""
        return "" if self.signal is None else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """128 plus the signal: 130 after Ctrl-C, 143 after SIGTERM; 0 where none came."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
