"""A timeline, or a page, that another process of the user's asks for while the job runs (`dtrun trace`)."""

from __future__ import annotations

import gzip
import threading

from ..runtime.host.job_sockets import MOST_ANSWER
from .chrome_trace import encode
from .profile import Profile

#: The most seconds of one.
LONGEST = 3600.0
#: Seconds more than it was to take until it ends by itself: nobody has asked for it.
GRACE = 5.0
#: The most bytes of one, which are text in the answer that has them.
MOST_DATA = MOST_ANSWER // 4 * 3 - 1024


class AskedTrace:
    """A timeline, recorded until somebody asks for it, or its time is over. The asking process writes it."""

    def __init__(self, seconds: float, page: bool = False) -> None:
        """``page``: it is a page, as ``dt.seeing.report`` writes it."""
        self._seconds, self._page = seconds, page
        self._profile = Profile()
        self._is_asked = threading.Event()
        self.data = b""  #: the timeline, compressed, once it is there
        self.failed = ""  #: why there is none

    def begin(self) -> None:
        """Begins. Raises what ``Profile.begin_recording`` does."""
        self._profile.begin_recording("from another terminal")
        threading.Thread(target=self._end, name="disttensor-trace", daemon=True).start()

    def stop(self) -> None:
        """Has the recording end now; it is ready a little later."""
        self._is_asked.set()

    def _end(self) -> None:
        self._is_asked.wait(self._seconds + GRACE)
        try:
            self._profile.end_recording(wait=False)
            made = self._profile
            data = gzip.compress(made.to_page(), 6) if self._page else encode(made.to_dict(), ".gz")
            if len(data) > MOST_DATA:
                self.failed = f"its timeline has {len(data):,} bytes, and {MOST_DATA:,} can be told: take fewer seconds"
            else:
                self.data = data
        except Exception as e:
            self.failed = f"{type(e).__name__}: {e}"
