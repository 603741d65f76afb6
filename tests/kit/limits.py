"""How long tests wait. Nothing is that slow: a limit only ends what hangs, and says what of it."""

from __future__ import annotations

#: Seconds after which what a test waits for hangs. A node that starts in 2 s takes 15 beside a load of ten busy
#: processes on two cores. Below the limit of a whole test (setup.cfg), so that the test says itself what did not come.
HANG = 120.0
#: The same for one run of all checks of a contract, which takes 160 s beside six busy processes.
CONTRACT_HANG = 280.0
