"""Operators that write into what they are given: in place, `out=`, and lists of tensors; against local PyTorch."""

from __future__ import annotations

import pytest
from differential import as_local, on_places

pytestmark = pytest.mark.usefixtures("clean")

INPLACE = """
x.add_(y); x
x.add_(1).mul_(y).sub_(s); x
x.add_(i); x
i.add_(2); i
i.mul_(j); i
h.add_(x); h
x.zero_(); x
x.fill_(3); x
x.fill_(s); x
x.copy_(y); x
x.copy_(i); x
x.copy_(v); x
x.copy_(torch.ones(4, 5)); x
x.copy_(torch.ones(5)); x
x[1:].copy_(torch.ones(3, 5)); x
x.t().copy_(y.t()); x
x.clamp_(0, 1); x
x.clamp_(min=0); x
x.exp_().log_(); x
x.neg_(); x
x.pow_(2); x
x.sqrt_(); x
x.addcmul_(y, p); x
x.addcdiv_(y, p, value=0.1); x
x.lerp_(y, 0.1); x
x.masked_fill_(x > 0, 0); x
x.floor_().abs_(); x
x.sign_(); x
x.tril_(); x
x.fill_diagonal_(9.0); x
x.uniform_(2, 2); x
x += y; x
x -= 1; x
x *= s; x
x /= 3; x
i //= 2; i
i %= 5; i
x **= 2; x
t |= o; t
t &= o; t
i <<= 1; i
x.addmm_(y, m.new_ones(5, 5)); x
x.swapaxes_(0, 1); x
x.t_(); x
x.transpose_(0, 1); x
x.unsqueeze_(0); x
x.unsqueeze_(0).squeeze_(0); x
x.squeeze_(); x
x.resize_(2, 3); x
x.random_(3, 4); x
torch.nn.init.constant_(x, 2.5); x
torch.nn.init.zeros_(x); x
torch.nn.init.eye_(m); m
"""

OUT = """
torch.add(x, y, out=p); p
torch.add(x, y, out=d); d
torch.mul(x, 2, out=x); x
torch.mm(x, w, out=torch.empty(4, 6, device=dev))
r = torch.empty(0, device=dev); torch.add(x, y, out=r); r
torch.cat([x, y], out=torch.empty(8, 5, device=dev))
torch.max(x, 1, out=(torch.empty(4, device=dev), torch.empty(4, dtype=torch.int64, device=dev)))
torch.sort(x, out=(p, at)); p, at
torch.matmul(x, w, out=w.new_empty(4, 6))
torch.exp(x, out=x); x
torch.arange(5, out=v); v
torch.where(t, x, y, out=p); p
torch.index_select(x, 0, rows, out=y[:3]); y
torch.sum(x, 0, out=v); v
torch.linalg.inv(spd, out=m); m
torch.eq(x, y, out=t); t
torch.clamp(x, 0, 1, out=y); y
torch.stack([v, v], out=torch.empty(2, 5, device=dev))
torch.cumsum(x, 0, out=y); y
torch.add(x, y, out=p.t()[:, :].t()); p
r = torch.empty(0, dtype=torch.int64, device=dev); torch.nonzero(t, out=r); len(r), r.shape, r * 2
r = torch.empty(0, device=dev); torch.masked_select(x, t, out=r); r.shape, r + 1
r = torch.empty(0, device=dev); q = r.detach(); torch.masked_select(x, x > -9, out=r); q.shape, r
r = torch.empty(40, device=dev); torch.masked_select(x, x > -9, out=r[:20]); r[:20]
torch.linalg.qr(m, out=(torch.empty(0, device=dev), torch.empty(0, device=dev)))
r = torch.empty(0, device=dev); torch.unbind_copy(x, out=[r, r.clone(), r.clone(), r.clone()]); r
"""

FOREACH = """
torch._foreach_add([x, y], 1.0)
torch._foreach_add([x, y], [p, p])
torch._foreach_add([x, y], [1.0, 2.0])
torch._foreach_add([x, y], [p, p], alpha=2)
torch._foreach_mul([x, v], 0.5)
torch._foreach_mul([x, v], s)
torch._foreach_sqrt([p])
torch._foreach_norm([x, y])
torch._foreach_add_([x, y], 1); x, y
torch._foreach_mul_([x, y], [p, p]); x, y
torch._foreach_addcmul_([x], [y], [p], 0.1); x
torch._foreach_addcdiv_([x], [y], [p], [0.5]); x
torch._foreach_lerp_([x], [y], 0.3); x
torch._foreach_zero_([x, y]); x, y
torch._foreach_copy_([x], [y]); x
torch._foreach_maximum([x], [y])
torch._foreach_pow([p], 2)
torch._foreach_neg([x, y])
"""


@on_places(INPLACE, OUT, FOREACH)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)
