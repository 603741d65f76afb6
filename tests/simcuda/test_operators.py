"""Operators on simulated devices, against the CPU's: a program of many, and the outputs of each compared."""

from __future__ import annotations

import pytest
from simcuda_kit import run

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "digamma",
    "isnan",
    "isfinite",
    "logical_not",
    "nan_to_num",
    "positive",
    "sgn",
    "signbit",
    "deg2rad",
    "rad2deg",
    "sinc",
    "i0",
    "erfinv",
    "logit",
    "angle",
    "isinf",
]
BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "pow",
    "remainder",
    "fmod",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "hypot",
    "copysign",
    "nextafter",
    "xlogy",
    "floor_divide",
    "heaviside",
    "logaddexp",
    "logaddexp2",
]
REDUCED = [
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "std",
    "var",
    "argmax",
    "argmin",
    "logsumexp",
    "median",
    "nansum",
    "any",
    "all",
    "count_nonzero",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "sort",
    "argsort",
    "softmax",
    "log_softmax",
    "logcumsumexp",
]
MORE = """
torch.cat([x, y]), torch.stack([x, y]), torch.where(m, x, y), x[m], x[i], x.index_select(1, i), x.gather(0, j)
x.scatter(0, j, y), x.scatter_add(0, j, y), x.index_add(0, i, x[:3]), x.index_fill(0, i, 7), x.masked_fill(m, 2)
x.masked_select(m), m.nonzero(), torch.unique(j), x.topk(2), x.kthvalue(2), x.roll(1, 0), x.tril(), x.triu(), x.diag()
torch.einsum('ij,kj->ik', x, y), x @ y.T
torch.addmm(x @ y.T, x, y.T), torch.bmm(x[None], y.T[None]), torch.mv(x, y[0])
torch.outer(x[0], y[0]), torch.dot(x[0], y[0]), torch.cdist(x, y), torch.lerp(x, y, .5), torch.addcmul(x, x, y)
torch.addcdiv(x, x, y), x.clamp(-1, 1), x.repeat(2, 3), x.expand(2, 4, 6).contiguous(), x.unfold(0, 2, 1).clone()
F.gelu(x), F.silu(x), F.elu(x), F.leaky_relu(x), F.softplus(x), F.hardtanh(x), F.mish(x), F.glu(x), F.hardswish(x)
F.layer_norm(x, (6,)), F.group_norm(x, 2), F.rms_norm(x, (6,)), F.embedding(j, y), F.one_hot(j, 4), F.pad(x, (1, 2))
F.mse_loss(x, y), F.cross_entropy(x, j[:, 0])
F.smooth_l1_loss(x, y), F.nll_loss(x, j[:, 0]), F.kl_div(x, y.softmax(0))
F.max_pool2d(z, 2), F.avg_pool2d(z, 2), F.adaptive_avg_pool2d(z, 2), F.interpolate(z, scale_factor=2), F.conv2d(z, w)
F.conv_transpose2d(z, w.transpose(0, 1)), F.conv1d(z[:, :, 0], w[:, :, 0])
F.unfold(z, 2), F.pixel_shuffle(z.repeat(1, 2, 1, 1)[:, :4], 2)
torch.linalg.inv(s), torch.linalg.solve(s, s)
torch.linalg.det(s), torch.linalg.cholesky(s @ s.T + 9 * torch.eye(4, device=s.device))
torch.bincount(j.flatten()), torch.histc(x, 4)
torch.searchsorted(x[0].sort()[0], y), torch.bucketize(y, x[0].sort()[0])
x.to(torch.float16), x.double(), x.long(), x.bool(), x.int().bitwise_and(3), x.int() << 1, torch.complex(x, y).abs()
torch.polar(x, y).real, torch.view_as_complex(torch.stack([x, y], -1)).angle()
torch.fft.fft(x).real, torch.meshgrid(x[0], y[0])
torch.arange(5, device=x.device), torch.linspace(0, 1, 5, device=x.device)
torch.eye(3, device=x.device), torch.zeros_like(x)
torch.full((3,), 2, device=x.device), torch.ones(2, 2, device=x.device), torch.tril_indices(3, 3, device=x.device)
x.clone().add_(1).mul_(2).fill_diagonal_(0), x.clone().zero_()
x.clone().copy_(y.half()), torch.add(x, y, out=x.new_empty(0))
torch._foreach_add([x, y], 1), torch._foreach_mul([x, y], [y, x])
torch._foreach_norm([x, y]), torch._foreach_sqrt([x.abs()])
torch.equal(x, y), x.allclose(x), torch.repeat_interleave(x, 2, 0)
x.squeeze(), x.movedim(0, 1).contiguous(), x.renorm(2, 0, 1)
""".strip().splitlines()

PROGRAM = """
import torch, warnings
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

warnings.simplefilter("ignore")  # of operators that torch will change

def host(value):
    return [v.cpu() if isinstance(v, torch.Tensor) else v for v in tree_leaves(value)]

generator = torch.Generator().manual_seed(3)
x, y = (torch.randn(4, 6, generator=generator) for _ in range(2))
z, w, s = (torch.randn(shape, generator=generator) for shape in ((2, 3, 6, 6), (3, 3, 2, 2), (4, 4)))
i, j = torch.tensor([0, 2, 1]), torch.randint(0, 4, (4, 6), generator=generator)
given = {"x": x, "y": y, "z": z, "w": w, "s": s, "i": i, "j": j, "m": x > 0}
there = {name: value.cuda() for name, value in given.items()}
wrong = []
for source in SOURCES:
    try:
        here = host(eval(source, {"torch": torch, "F": F, **given}))
        on_it = host(eval(source, {"torch": torch, "F": F, **there}))
        torch.testing.assert_close(on_it, here, equal_nan=True)
    except Exception as error:
        wrong.append(f"{source}: {type(error).__name__}: {str(error)[:300]}")
print(len(SOURCES), "compared", *wrong, sep="\\n")
"""


#: Those that need an argument more than one tensor.
SOURCES = [
    *(f"torch.{name}(x)" for name in UNARY),
    *(f"torch.{name}(x, y)" for name in BINARY),
    *(f"torch.{name}(x, 2)" for name in ("add", "mul", "pow", "eq")),
    *(
        f"torch.{name}(x)"
        for name in ["sum", "mean", "prod", "amax", "amin", "std", "var", "argmax", "median", "any", "all"]
    ),
    *(f"torch.{name}(x, 1)" for name in REDUCED),
    "x.norm(dim=1), x.flip(1), torch.aminmax(x, dim=1)",
    *MORE,
]


def test_they_compute_what_the_cpu_does():
    out = run(PROGRAM.replace("SOURCES", repr([f"({source},)" for source in SOURCES])), kernels=True, delay_ms=0)
    assert out == f"{len(SOURCES)}\ncompared\n", out


#: Views that torch's meta kernels lay other results for than its kernels do: dimensions of one element, steps, none.
VIEWS = [
    "torch.ones(1, 6).t()",
    "torch.ones(6, 1).t()",
    "torch.ones(2, 1, 3).transpose(0, 1)",
    "torch.ones(4)[1:2].as_strided((1, 1), (7, 3))",
    "torch.ones(4, 6)[:, ::2]",
    "torch.ones(4, 3).t()",
    "torch.ones(4).expand(3, 4)",
    "torch.ones(3, 2, 4, 1).permute(0, 3, 1, 2)",
    "torch.ones(3, 0).t()",
]
#: Calls for which torch has one function that lays the results, for CPUs and CUDA. Its own code for CUDA, run once with
#: launches that did nothing, laid them as a CPU's does, except for the seven that want a compiler. It did not for those
#: that are two functions: foreach, dropout, ``rms_norm``, ``logsigmoid``.
IN_COMMON = [
    *(f"torch.{name}(x)" for name in UNARY),
    *(f"torch.{name}(x, {other})" for name in BINARY for other in ("x", "x.contiguous()", "x[:1]")),
    *(f"torch.{name}(x, x.double())" for name in ("add", "mul", "maximum", "atan2", "lt")),
    *(
        f"torch.{name}({both})"
        for name in ("add", "sub", "mul", "div", "pow", "eq", "gt")
        for both in ("x, 2", "2 - x, x")
    ),
    *(
        f"F.{name}(x)"
        for name in ("relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "hardtanh", "mish", "hardswish")
    ),
    *("x.clamp(-1, 1)", "x.clamp(min=0)", "torch.where(x > 0, x, 2)", "torch.lerp(x, x * 2, .5)", "x.half() + x"),
    *("x.flip(0)", "x.tril()", "x.renorm(2, 0, 1)", "F.hardsigmoid(x)", "torch.polar(x, x)", "x.sum(0)", "x.amax(1)"),
    *("F.mse_loss(x, x, reduction='none')", "F.prelu(x, x.new_ones(1))", "torch.frexp(x)[0]", "~(x > 0)", "x % 2"),
    *("torch.add(x, x, out=x.new_empty(0))", "torch.abs(x, out=x.new_empty(0))", "x.clone().relu_()"),
    *("torch.addcmul(x, x, x)", "F.threshold(x, 0, 1)", "x.masked_fill(x > 0, 2)", "x.clone()", "x.double()", "-x * x"),
]
LAID = """
import torch, warnings
from torch.nn import functional as F

warnings.simplefilter("ignore")  # of operators that torch will change

wrong = []
for view in VIEWS:
    here, there = (eval(view.replace(")", f", device={device!r})", 1)) for device in ("cpu", "cuda"))
    assert here.stride() == there.stride()
    for source in IN_COMMON:
        found, expected = (eval(source, {"torch": torch, "F": F, "x": x}).stride() for x in (there, here))
        if found != expected:
            wrong.append(f"{source} of {view}: {found}, here {expected}")
print(len(VIEWS), len(IN_COMMON), *wrong, sep="\\n")
"""


def test_results_lie_as_those_of_kernels():
    """Meta kernels tell of other strides: torch's own code for CUDA lays these results as a CPU's does."""
    out = run(LAID.replace("VIEWS", repr(VIEWS)).replace("IN_COMMON", repr(IN_COMMON)), kernels=True, delay_ms=0)
    assert out == f"{len(VIEWS)}\n{len(IN_COMMON)}\n", out
