"""A name that there is not, and one that there was."""

from __future__ import annotations

import disttensor as dt

dt.all_reduc([])  # mypy: attr-defined; pyright: reportAttributeAccessIssue
dt.ones(3)  # mypy: attr-defined; pyright: reportAttributeAccessIssue
