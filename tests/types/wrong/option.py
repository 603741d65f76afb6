"""An option of the start that there is not."""

from __future__ import annotations

import disttensor as dt

dt.init_master_worker(nodez=3)  # mypy: call-arg; pyright: reportCallIssue
