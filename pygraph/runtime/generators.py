"""The random numbers of a region: runs that answer no call draw them without undoing what other threads draw.

A region that draws nothing has nothing saved and nothing restored. One that draws uses the default generator of its
device, which other threads may use as well. Two ways keep them apart:

- A run whose numbers the answering run draws again comes first, on the generator as it is, and is undone right after:
  in one step, and only if nobody drew since it ended. What another thread draws *during* that run is not noticed, and
  comes once more.
- All other runs draw from a stream of their own. As long as they take, the generator has a state that nobody had
  before, and what other threads draw comes from that stream, too. Then the generator goes on where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pygraph.errors import ReplayError
from pygraph.runtime.driver import Driver, Program

__all__ = ["Draws"]


class Draws:
    """The generator that ``program`` draws from; false if there is none. Without a program, nothing is drawn.

    All methods raise ReplayError if a state cannot be brought back: the numbers drawn later would be others.
    """

    def __init__(self, driver: Driver, program: Program | None) -> None:
        self._driver = driver
        self._generator = None if program is None else driver.generator(program)
        self._start = self.end = self.state()

    def __bool__(self) -> bool:
        return self._generator is not None

    def state(self) -> torch.Tensor | None:
        """The state of the generator now; None where nothing is drawn."""
        return None if self._generator is None else self._generator.get_state()

    def undo(self) -> bool:
        """Bring back the state that the generator had when this object was made; ``end`` is the one that it had.

        False, with nothing changed, if somebody drew in the meantime.
        """
        if self._start is None:
            return True
        with _told():
            self.end = self.state()
            before = self._exchange(self._start, self.end)
            return self.end is not None and torch.equal(before, self.end)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Draw from a stream of numbers that nobody drew from before. ``restart`` goes back to its beginning."""
        if self._generator is None:
            yield
            return
        own = torch.Generator(self._generator.device)
        own.seed()
        outer, self._start = self._start, own.get_state()
        theirs = self._exchange(self._start)
        try:
            yield
        finally:
            self._start = outer
            with _told():
                self._exchange(theirs)

    def restart(self) -> None:
        """Within ``apart``: draw the same numbers once more."""
        self.go_on(self._start)

    def go_on(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """Within ``apart``: draw from ``state`` on. Returns the state until then."""
        return None if state is None else self._exchange(state)

    def _exchange(self, to: torch.Tensor, expected: torch.Tensor | None = None) -> torch.Tensor:
        assert self._generator is not None
        return self._driver.exchange_state(self._generator, to, expected)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Whatever is raised becomes a ReplayError."""
    try:
        yield
    except Exception as error:
        said = f"the random state could not be brought back: {type(error).__name__}: {error}"
        raise ReplayError(said) from error
