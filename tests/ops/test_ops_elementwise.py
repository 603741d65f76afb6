"""Operators from element to element, and comparisons, against local PyTorch."""

from __future__ import annotations

import pytest
from differential import as_local, on_places

pytestmark = pytest.mark.usefixtures("clean")

ELEMENTWISE = """
x + y
x - y
x * y
x / y
x // y
x % y
x ** 2
p ** y
2 ** x
-x
+x
abs(x)
1 - x
1 / x
x + 1
x + 1.0
x + True
x * 0.0
x * -0.0
x * nan
x * inf
i + 1
i + 1.0
i * True
i / 2
i // 2
i // -2
i % 3
j + i
k + k
k - 200
t + 1
t * 1.5
t & o
t | o
t ^ o
~t
~i
i & 3
i << 2
i >> 1
x + i
h + x
h + 1
h * h
f + h
d + x
x + s
s + x
s + s
s + n
i + s
s * 2
h + s
torch.add(x, y, alpha=2)
torch.add(i, j, alpha=3)
torch.sub(x, y, alpha=0.5)
torch.rsub(x, 3)
torch.addcmul(x, y, p, value=0.3)
torch.addcdiv(x, y, p, value=-2)
torch.lerp(x, y, 0.25)
torch.lerp(x, y, p)
torch.exp(x)
torch.exp2(x)
torch.expm1(x)
torch.log(p)
torch.log2(p)
torch.log10(p)
torch.log1p(p)
torch.sqrt(p)
torch.rsqrt(p)
torch.square(x)
torch.sin(x)
torch.cos(x)
torch.tan(x)
torch.asin(u)
torch.acos(u)
torch.atan(x)
torch.atan2(x, y)
torch.sinh(x)
torch.cosh(x)
torch.tanh(x)
torch.asinh(x)
torch.acosh(p + 1)
torch.atanh(u)
torch.sigmoid(x)
torch.logit(p / 9, eps=1e-6)
torch.erf(x)
torch.erfc(x)
torch.erfinv(u)
torch.lgamma(p)
torch.digamma(p)
torch.polygamma(1, p)
torch.mvlgamma(p + 3, 2)
torch.special.i0(x)
torch.special.ndtri(p / 9)
torch.special.zeta(p + 1, p)
torch.sinc(x)
torch.floor(x)
torch.ceil(x)
torch.round(x)
torch.round(x, decimals=1)
torch.trunc(x)
torch.frac(x)
torch.sign(x)
torch.sgn(z)
torch.signbit(odd)
torch.copysign(x, y)
torch.copysign(odd, -0.0)
torch.copysign(odd, 0.0)
torch.reciprocal(x)
torch.neg(i)
torch.clamp(x, -0.5, 0.5)
torch.clamp(x, min=0.1)
torch.clamp(x, max=y)
torch.clamp(i, 1, 3)
torch.clip(x, y, p)
torch.fmod(x, 0.7)
torch.remainder(x, -0.7)
torch.remainder(i, 4)
torch.hypot(x, y)
torch.ldexp(x, i)
torch.frexp(x)
torch.nextafter(x, y)
torch.maximum(x, y)
torch.minimum(x, y)
torch.fmax(odd, odd.flip(0))
torch.fmin(odd, odd.flip(0))
torch.gcd(i, j)
torch.lcm(i, j)
torch.logaddexp(x, y)
torch.xlogy(x, p)
torch.heaviside(x, s)
torch.nan_to_num(odd)
torch.nan_to_num(odd, nan=7.0, posinf=1.0)
torch.deg2rad(x)
torch.real(z)
torch.imag(z)
torch.conj(z)
z.conj() * z
z.imag.neg()
torch.angle(z)
torch.abs(z)
torch.polar(p, x)
torch.complex(x, y)
torch.view_as_real(z)
torch.view_as_complex(b.reshape(2, 2, 5, 2))
z + 1
z * 2.5j
z * (1 + 2j)
x * 2j
z.conj().t()
z.mH
z + x
zm @ zm.mH
torch.logical_and(x, t)
torch.logical_not(i)
torch.logical_xor(t, o)
torch.bitwise_and(i, j)
torch.bitwise_not(k)
torch.bitwise_left_shift(i, 2)
torch.where(t, x, y)
torch.where(t, x, 0.0)
torch.where(t, 1.0, -0.0)
torch.where(t, x, d)
torch.where(x > 0, i, j)
x.masked_fill(t, nan)
x.masked_fill(t, s)
x.to(torch.float64)
x.to(torch.int32)
x.bfloat16().float()
i.bool()
d.half()
x.to(torch.complex64)
x.to(d)
x.type(torch.int16)
x.type_as(h)
x.clone()
x.t().clone()
x.t().contiguous()
x.t() + y.t()
x.t() * 2
x.t() + x.t().contiguous()
b.permute(2, 0, 1) + 1
b.permute(2, 0, 1).exp()
img.to(memory_format=torch.channels_last)
img.to(memory_format=torch.channels_last) * 2
img.contiguous(memory_format=torch.channels_last).clone(memory_format=torch.contiguous_format)
x[:, ::2] + 1
x.expand(3, 4, 5) * 2
v.expand(4, 5) + 1
x.float() is x
x.to(x.dtype) is x
"""

COMPARE = """
x > y
x >= 0
x < 0.5
x <= y
x == x
x != y
i == 3
i == 3.0
i > 2.5
odd == odd
odd == 0.0
odd == nan
t == o
t == True
t == 1
torch.isnan(odd)
torch.isinf(odd)
torch.isposinf(odd)
torch.isneginf(odd)
torch.isfinite(odd)
torch.isreal(z)
torch.isclose(x, y, rtol=1)
torch.allclose(x, x + 1e-9)
torch.allclose(x, y)
torch.equal(x, x.clone())
torch.equal(x, y)
torch.isin(i, j)
torch.isin(i, 3)
torch.any(x > 2)
torch.all(x < 9)
bool((x > y).any())
x.is_complex(), x.is_floating_point(), i.is_signed(), x.is_contiguous(), x.t().is_contiguous()
x.element_size(), x.nelement(), x.dim(), x.ndim, len(x), x.itemsize, x.nbytes
torch.is_nonzero(n)
float(s), int(n), complex(s), n.item(), s.item(), z[0, 0].item(), t[0, 0].item()
list(range(10))[n]
[1, 2, 3, 4][n.item()]
f"{s:.3f}"
"%d" % n
torch.can_cast(x.dtype, i.dtype)
torch.result_type(x, i)
torch.result_type(i, 2.0)
torch.is_tensor(x)
torch.numel(b)
x.tolist()
i.tolist()
z.tolist()
n.tolist()
empty.tolist()
x.size(), x.size(0), x.stride(), x.shape
"""


@pytest.mark.row("M6")
@on_places(ELEMENTWISE, COMPARE)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)
