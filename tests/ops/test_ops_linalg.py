"""Products of matrices, LAPACK and Fourier transforms, against local PyTorch."""

from __future__ import annotations

import pytest
import torch
from differential import as_local, on_devices, on_places

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

MATMUL = """
x @ w
torch.mm(x, w)
x @ v
v @ w
v @ v
torch.dot(v, v)
torch.vdot(v, v)
torch.mv(x, v)
torch.bmm(b, c)
b @ c
b @ w
torch.matmul(img, img)
torch.addmm(y[:, :1] * 0 + y[:, :1], x, w[:, :1])
torch.addmm(bias[:, None], x, w, beta=0.5, alpha=2)
torch.addmv(bias, x, v)
torch.addr(x, bias, v)
torch.baddbmm(b[:, :, :3], b, c, beta=0.1)
torch.addbmm(x[:, :3], b, c)
torch.outer(v, bias)
torch.ger(v, v)
torch.inner(x, y)
torch.tensordot(b, c, dims=([2], [1]))
torch.einsum("bij,bjk->ik", b, c)
torch.einsum("ij,ij->i", x, y)
torch.kron(x, v)
torch.cross(three, var, dim=0)
torch.chain_matmul(x, w) if False else torch.linalg.multi_dot([x, w, w.t()])
torch.cdist(x, y)
torch.cdist(x, y, p=1)
F.cosine_similarity(x, y)
F.pairwise_distance(x, y)
F.linear(x, y)
F.linear(x, w.t())
F.linear(x, y, bias)
F.bilinear(x, y, table[None, :5].expand(2, 5, 5), v[:2])
h @ h.t()
(i @ i.t())
z @ z.t()
x.t() @ x
x.matmul(w).t() @ y
torch.matrix_power(m, 3)
"""

LINALG = """
torch.linalg.inv(spd)
torch.inverse(spd)
torch.linalg.det(m)
torch.det(m)
torch.logdet(spd)
torch.linalg.slogdet(m)
torch.linalg.cholesky(spd)
torch.linalg.cholesky_ex(spd)
torch.cholesky_inverse(torch.linalg.cholesky(spd))
torch.cholesky_solve(x, torch.linalg.cholesky(spd))
torch.linalg.qr(x)
torch.linalg.qr(x, mode="r")
torch.linalg.svd(x)
torch.linalg.svd(x, full_matrices=False)
torch.linalg.svdvals(x)
torch.linalg.svdvals(x.requires_grad_())
torch.linalg.eigh(spd)
torch.linalg.eigvalsh(spd)
torch.linalg.eigvalsh(spd.requires_grad_())
torch.linalg.eig(m)
torch.linalg.eigvals(m)
torch.linalg.eigvals(m.requires_grad_())
torch.linalg.solve(spd, x)
torch.linalg.solve_triangular(spd.tril(), x, upper=False)
torch.triangular_solve(x, spd.triu())
torch.linalg.lu(m)
torch.linalg.lu_factor(m)
torch.linalg.lu_solve(*torch.linalg.lu_factor(m), x)
torch.linalg.ldl_factor(spd)
torch.linalg.pinv(x)
torch.linalg.matrix_rank(m)
torch.linalg.matrix_exp(m)
torch.linalg.cond(m)
torch.linalg.cond(m, "nuc")
torch.linalg.matrix_norm(m, 2)
torch.linalg.norm(m, "nuc")
torch.linalg.matrix_rank(x, hermitian=False)
torch.linalg.householder_product(x[:, :3], three)
torch.geqrf(x)
torch.ormqr(*torch.geqrf(m), m)
torch.linalg.vander(v)
torch.fft.fft(x)
torch.fft.ifft(z)
torch.fft.rfft(x)
torch.fft.irfft(z)
torch.fft.fft2(x)
torch.fft.fftn(b)
torch.fft.rfft2(x)
torch.fft.hfft(z)
torch.fft.fftshift(x)
torch.stft(big, 8, window=torch.hann_window(8, device=dev), return_complex=True)
"""


@pytest.mark.row("M6")
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@on_places(MATMUL, LINALG)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)


@on_devices
@pytest.mark.parametrize("driver", [None, "gels", "gelsd", "gelss"])
def test_least_squares(driver: str | None, name: str) -> None:
    # nothing to compare bit for bit: what LAPACK gives depends on where in memory the operands lie, locally too
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(5, 4, generator=g), torch.randn(5, 2, generator=g)
    device = dt.device(1, name)
    got, expected = (
        torch.linalg.lstsq(a.to(device), b.to(device), driver=driver),
        torch.linalg.lstsq(a, b, driver=driver),
    )
    for r, x in zip(got, expected, strict=True):
        assert r.shape == x.shape
        torch.testing.assert_close(r.cpu(), x)
