"""Progress bars, where tqdm is installed and someone can see them."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """A bar of tqdm, in a terminal or a notebook; nothing where there is neither, or no tqdm.

    `progress`: True and False decide; None shows a bar in terminals and notebooks.
    """

    def __init__(self, progress: bool | None, what: str, total: int | None = None, unit: str = "episode") -> None:
        self._bar: Any = None
        self._share = 0.0
        if progress is None:
            progress = sys.stderr.isatty() or "ipykernel" in sys.modules
        if not progress:
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        self._bar = tqdm(desc=what, total=total, unit=unit, dynamic_ncols=True, leave=False)

    def start(self, done: int, total: int) -> None:
        """Sets where the bar begins and ends."""
        if self._bar is not None:
            self._bar.reset(total)
            self._bar.n = self._bar.initial = done
            self._bar.refresh()

    def to(self, done: int, text: str = "") -> None:
        """Moves the bar."""
        if self._bar is not None:
            if text:
                self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Shows where the bar has come to, then removes it."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
