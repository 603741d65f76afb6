"""Twins of the asynchronous strategies: ordinary programs in one process, each written from its paper's formula.

They know torch and the events of a run, and nothing of disttensor. ``events`` are (kind, worker, step, version,
workers); ``gradient(i, t, x)`` is that of worker i at its step t where its values are x. Each returns the server's
values (or None) and each worker's.
"""

from __future__ import annotations

import torch


def plus(xs, ys, factor=1.0):  # type: ignore[no-untyped-def]
    return [torch.add(x, y, alpha=factor) for x, y in zip(xs, ys, strict=True)]


def downpour(events, first, gradient, rate):  # type: ignore[no-untyped-def]
    """Dean et al. 2012, algorithm 7.1: gradients accrue; the server goes by -rate times what has accrued."""
    server, pushes = first, 0
    x, asked, accrued, sent = {}, {}, {}, {}
    for kind, i, t, version, _ in events:
        if kind == "pull":
            assert version == pushes
            asked[i] = server
        elif kind == "take":
            x[i] = asked.pop(i)
        elif kind == "step":
            g = gradient(i, t, x[i])
            accrued[i] = plus(accrued[i], g) if i in accrued else g
            x[i] = plus(x[i], g, -rate)
        elif kind == "send":
            sent.setdefault(i, []).append(accrued.pop(i))
        elif kind == "push":
            server, pushes = plus(server, sent[i].pop(0), -rate), pushes + 1
            assert version == pushes
    return server, x


def easgd(events, first, gradient, rate, alpha, momentum=0.0):  # type: ignore[no-untyped-def]
    """Zhang, Choromanska, LeCun 2015, algorithms 1 (EASGD) and 2 (EAMSGD), of a centre that a server has."""
    centre, pushes = first, 0
    x, v, asked, force, sent = {}, {}, {}, {}, {}
    for kind, i, t, version, _ in events:
        if kind == "pull":
            assert version == pushes
            asked[i] = centre
        elif kind == "take" and t == 0:
            x[i] = asked.pop(i)
        elif kind == "take":
            force[i] = [(a - c) * alpha for a, c in zip(x[i], asked.pop(i), strict=True)]
        elif kind == "send":
            sent.setdefault(i, []).append(force[i])
        elif kind == "push":
            centre, pushes = plus(centre, sent[i].pop(0)), pushes + 1
            assert version == pushes
        elif kind == "step":
            x[i] = _easgd_step(i, t, x[i], v, force.pop(i, None), gradient, rate, momentum)
    return centre, x


def easgd_together(events, first, gradient, rate, alpha, momentum=0.0):  # type: ignore[no-untyped-def]
    """The same where all workers meet: equations 3 and 4."""
    centre, x, v, force = first, {}, {}, {}
    for kind, i, t, _, workers in events:
        if kind == "meet":
            for k in workers:
                force[k] = [(a - c) * alpha for a, c in zip(x.get(k, first), centre, strict=True)]
            total = force[workers[0]]
            for k in workers[1:]:
                total = plus(total, force[k])
            centre = plus(centre, total)
        elif kind == "step":
            x[i] = _easgd_step(i, t, x.get(i, first), v, force.pop(i, None), gradient, rate, momentum)
    return centre, x


def _easgd_step(i, t, x, v, force, gradient, rate, momentum):  # type: ignore[no-untyped-def]
    if not momentum:
        g = gradient(i, t, x)
        return plus(x if force is None else plus(x, force, -1.0), g, -rate)
    speed = v.get(i, [torch.zeros_like(a) for a in x])
    g = gradient(i, t, plus(x, speed, momentum))
    v[i] = plus([s * momentum for s in speed], g, -rate)
    return plus(x if force is None else plus(x, force, -1.0), v[i])


def local_sgd(events, first, gradient, rate, outer_rate=None, outer_momentum=0.0):  # type: ignore[no-untyped-def]
    """Stich 2018: means. With an outer rate Douillard et al. 2023 (DiLoCo): Nesterov's momentum on their way."""
    x, shared, buffer = {}, first, None
    for kind, i, t, _, workers in events:
        if kind == "step":
            here = x.get(i, first)
            x[i] = plus(here, gradient(i, t, here), -rate)
        elif kind == "meet":
            total = x[workers[0]]
            for k in workers[1:]:
                total = plus(total, x[k])
            mean = [a / len(workers) for a in total]
            if outer_rate is not None:
                moved = [s - m for s, m in zip(shared, mean, strict=True)]
                buffer = moved if buffer is None else plus([b * outer_momentum for b in buffer], moved)
                shared = mean = plus(shared, plus(moved, buffer, outer_momentum), -outer_rate)
            for k in workers:
                x[k] = mean
    return None, x


def local_sgd_of_modules(events, modules, backward, rate):  # type: ignore[no-untyped-def]
    """Stich 2018 for modules with buffers, which move with each pass; "buffers": fractions become their mean."""
    for kind, i, t, _, workers in events:
        if kind == "step":
            for p in modules[i].parameters():
                p.grad = None
            backward(i, t, modules[i])
            for p in modules[i].parameters():
                p.data = torch.add(p.data, p.grad, alpha=-rate)
        elif kind == "meet":
            means_of([list(modules[k].parameters()) for k in workers])
        elif kind == "buffers":
            means_of([list(modules[k].buffers()) for k in workers])


def means_of(rows):  # type: ignore[no-untyped-def]
    """Gives all the mean of each tensor, of whole numbers the first's."""
    for tensors in zip(*rows, strict=True):
        total = tensors[0].data
        for other in tensors[1:]:
            total = total + other.data
        mean = total / len(tensors) if total.is_floating_point() else tensors[0].data
        for tensor in tensors:
            tensor.data = mean.clone()


def all_reduce_sgd(runs, first, gradient, rate):  # type: ignore[no-untyped-def]
    """torch-distlearn's AllReduceSGD: rank k has ``runs[k]`` steps, each by the mean of the ranks that have one.

    Returns each rank's values at its end, and those of the longest run, which all have then.
    """
    x = [first] * len(runs)
    for t in range(max(runs)):
        there = [k for k, steps in enumerate(runs) if t < steps]
        total = gradient(there[0], t)
        for k in there[1:]:
            total = plus(total, gradient(k, t))
        for k in there:
            x[k] = plus(x[k], [g / len(there) for g in total], -rate)
    return x, x[max(range(len(runs)), key=lambda k: (runs[k], -k))]
