"""An attribute that a node has not."""

from __future__ import annotations

import disttensor as dt

dt.nodes()[0].hostname.upper()  # mypy: attr-defined; pyright: reportAttributeAccessIssue
