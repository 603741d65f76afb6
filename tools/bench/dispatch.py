"""python tools/bench/dispatch.py [--security none] [--repeats 9] [--calls 3000] [--forms]

The eager hot path: what the master pays to issue small operations, against the same operations done locally in the
same run. `issue` is the time until the calls have returned; `sustained` until the last value has been fetched.
Security, flow control and call-site capture are on, as for users. ``--forms`` measures more forms of calls instead, by
the CPU time of the issuing thread, the least of the repeats: what a busy machine changes least.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import disttensor as dt

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "y * 0.999": lambda x, y: x * 0.999,
    "x + y": lambda x, y: x + y,
    "relu(x)": lambda x, y: torch.relu(x),
    "x @ y": lambda x, y: x @ y,
    "x.sum()": lambda x, y: x.sum(),
    "x.t()": lambda x, y: x.t(),
    "x[0]": lambda x, y: x[0],
}

#: Further forms of calls; ``g`` requires a gradient.
FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **OPS,
    "x.relu()": lambda x, g: x.relu(),
    "F.relu(x)": lambda x, g: F.relu(x),
    "torch.mul(x, 0.999)": lambda x, g: torch.mul(x, 0.999),
    "x.add_(1e-9)": lambda x, g: x.add_(1e-9),
    "x.add_(x)": lambda x, g: x.add_(x),
    "x.zero_()": lambda x, g: x.zero_(),
    "softmax(x, -1)": lambda x, g: torch.softmax(x, -1),
    "sum(x, 0)": lambda x, g: torch.sum(x, 0),
    "lerp(x, x, 0.5)": lambda x, g: torch.lerp(x, x, 0.5),
    "x[2:5]": lambda x, g: x[2:5],
    "x.view(4, 64)": lambda x, g: x.view(4, 64),
    "x.detach()": lambda x, g: x.detach(),
    "zeros_like(x)": lambda x, g: torch.zeros_like(x),
    "g * 0.999": lambda x, g: g * 0.999,
    "g + x": lambda x, g: g + x,
    "g @ x": lambda x, g: g @ x,
    "relu(g)": lambda x, g: torch.relu(g),
    "linear(x, g)": lambda x, g: F.linear(x, g),
    "g.t()": lambda x, g: g.t(),
}


def least(op: Callable[..., object], x: torch.Tensor, g: torch.Tensor, n: int) -> float:
    """Seconds of this thread's CPU per operation."""
    start = time.thread_time()
    for _ in range(n):
        op(x, g)
    return (time.thread_time() - start) / n


def compare_forms(local: torch.Tensor, remote: torch.Tensor, repeats: int, calls: int) -> None:
    found: dict[str, float] = {}
    operands = [(x, x.clone().requires_grad_()) for x in (local, remote)]
    print(f"{'16x16, us of CPU per op':24} {'local':>8} {'issue':>8} {'issue x':>8}")
    for name, op in FORMS.items():
        runs = []
        for n in [150] + [calls] * repeats:
            here, there = (least(op, x, x if name in OPS else g, n) for x, g in operands)
            dt.synchronize()
            runs.append((here, there))
        here, there = (min(column) for column in zip(*runs[1:], strict=True))
        found[name] = there / here
        print(f"{name:24} {here * 1e6:8.2f} {there * 1e6:8.2f} {found[name]:8.2f}")
    mean = math.exp(statistics.fmean(math.log(found[name]) for name in OPS))
    print(f"CPU time of the mix, geometric mean over local eager: {mean:.2f}x")


def issue(op: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[float, float]:
    """(seconds to issue, seconds until fetched) per operation."""
    start = time.perf_counter()
    for _ in range(n):
        z = op(x, y)
    issued = time.perf_counter()
    z.sum().item()
    done = time.perf_counter()
    return (issued - start) / n, (done - start) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--security", default="curve")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--forms", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = torch.randn(16, 16), torch.randn(16, 16)
    with dt.init_master_worker(nodes=2, security=options.security):
        remote = local[0].to("node:1"), local[1].to("node:1")
        if options.forms:
            compare_forms(local[0], remote[0], options.repeats, options.calls)
            return
        ratios: dict[str, tuple[float, float]] = {}
        print(f"{'16x16, us per op':18} {'local':>8} {'issue':>8} {'sustained':>10} {'issue x':>8} {'sust. x':>8}")
        for name, op in OPS.items():
            issue(op, *remote, n=500), issue(op, *local, n=500)
            runs = []
            for _ in range(options.repeats):
                runs.append((issue(op, *local, n=options.calls)[0], *issue(op, *remote, n=options.calls)))
            here, issued, done = (statistics.median(column) for column in zip(*runs, strict=True))
            r_issue = statistics.median(r[1] / r[0] for r in runs)
            r_done = statistics.median(r[2] / r[0] for r in runs)
            ratios[name] = r_issue, r_done
            print(f"{name:18} {here * 1e6:8.2f} {issued * 1e6:8.2f} {done * 1e6:10.2f} {r_issue:8.2f} {r_done:8.2f}")
        for i, what in enumerate(("issue", "sustained")):
            mean = math.exp(statistics.fmean(math.log(r[i]) for r in ratios.values()))
            print(f"{what} of the mix, geometric mean over local eager: {mean:.2f}x")


if __name__ == "__main__":
    main()
