"""A reduction that there is not."""

from __future__ import annotations

import torch

import disttensor as dt

xs = [torch.ones(3, device=f"node:{k}") for k in range(2)]
dt.all_reduce(xs, "menn")  # mypy: call-overload; pyright: reportCallIssue
dt.views.accumulate(xs[0], 1, "mean")  # mypy: call-overload; pyright: reportCallIssue
