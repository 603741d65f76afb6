"""When a worker takes the server's values."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.process.spelling import shown


class Schedule(NamedTuple):
    """The steps at which a worker takes part, from 1 on: ``delay + every``, ``delay + 2 * every``, ...

    What it takes from a server is asked for ``prefetch`` steps *before* that, at the beginning of the step, and is as
    of then: so it arrives beside the steps between. Raises ValueError for a schedule that cannot be kept.
    """

    delay: int = 0
    every: int = 10
    prefetch: int = 0

    def checked(self, what: str) -> Schedule:
        """Returns the schedule. Raises TypeError, ValueError."""
        for name, number, least in zip(self._fields, self, (0, 1, 0), strict=True):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{what}: {name} is a number of steps, not {shown(number)}")
            if number < least:
                raise ValueError(f"{what}: {name} is {least} or more steps, not {number}")
        if self.prefetch >= self.every and self.prefetch:
            raise ValueError(f"{what}: prefetch={self.prefetch} steps have to be fewer than every={self.every}")
        return self

    def takes(self, step: int) -> bool:
        """Returns whether a worker takes part at this step."""
        return step > self.delay and (step - self.delay) % self.every == 0

    def asks(self, step: int) -> bool:
        """Returns whether it asks at this step for what it takes, now or later."""
        return self.takes(step + self.prefetch)


#: At every tenth step.
EVERY_TEN = Schedule()
