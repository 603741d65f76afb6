"""What is not a tensor, and a Work used as one."""

from __future__ import annotations

import torch

import disttensor as dt

dt.fetch("x")  # mypy: arg-type; pyright: reportArgumentType
dt.fetch(torch.ones(3)).sum()  # mypy: attr-defined; pyright: reportAttributeAccessIssue
