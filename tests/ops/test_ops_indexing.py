"""Operators that pick, write, join or rearrange elements, against local PyTorch."""

from __future__ import annotations

import pytest
from differential import as_local, on_places

pytestmark = pytest.mark.usefixtures("clean")

INDEX = """
x[0]
x[-1]
x[1:3]
x[:, 2]
x[1:, ::2]
x[..., 1]
x[None]
x[:, None, 1:2]
x[0, 0]
x[0][0]
x[rows]
x[rows, cols]
x[:, rows]
x[rows[:, None], cols]
b[:, rows]
b[0, rows, 1:3]
x[[2, 0]]
x[[0, 1], [1, 2]]
x[[True, False, True, True]]
x[n]
x[n, 1]
x[t]
x[x > 0]
x[t[:, 0]]
x[:, t[0]]
x[~t]
x[t & o]
x[rows, t[0]][0:0] if False else x[rows]
x[torch.tensor([0, 1])]
x[torch.tensor([True, False, True, False])]
x[torch.tensor(2)]
x[k[:1, :1].long() % 4]
x[rows.int()]
b[..., None]
x[0] = 7; x
x[0] = v; x
x[:, 1] = s; x
x[1:3, 1:3] = 0.5; x
x[rows] = 2.0; x
x[rows] = y[:3]; x
x[rows, cols] = three; x
x[t] = -1.0; x
x[t] = 0; x
x[t] = y[t]; x
x[x > 0] = s; x
x[..., -1] += 3; x
x[0] *= 2; x
x[rows] += 1; x
x[1] = i[0]; x
x[torch.tensor([0, 2])] = 1.5; x
x[0, 0] = torch.tensor(9.0); x
i[0] = 3.7; i
t[0] = True; t
i[1] = True; i
h[0] = x[0]; h
z[0] = 1 + 2j; z
x.index_select(1, cols)
x.index_add(0, rows, y[:3])
x.index_add_(0, rows, y[:3], alpha=2)
x.index_copy(0, rows, y[:3])
x.index_fill(0, rows, 5.0)
x.index_fill_(1, cols, s)
x.index_put((rows, cols), three)
x.index_put_((rows, cols), three, accumulate=True)
x.index_put_((t,), s)
x.index_reduce(0, rows, y[:3], "amax")
x.gather(0, at)
x.gather(1, at)
x.scatter(0, at, y)
x.scatter(0, at, 2.5)
x.scatter_(1, at, y)
x.scatter_add(0, at, y)
x.scatter_add_(0, at, y)
x.scatter_reduce(0, at, y, "sum")
x.scatter_reduce(0, at, y, "amin", include_self=False)
x.scatter(0, at, 2.0, reduce="multiply")
x.take(at)
x.put(rows, three)
x.put_(rows, three, accumulate=True)
torch.take_along_dim(x, at, 0)
torch.masked_select(x, t)
x.masked_scatter(t, y)
x.masked_scatter_(t, y)
x.masked_fill_(t, 3); x
x.select_scatter(v, 0, 2)
x.slice_scatter(y[:2], 0, 1, 3)
x.diagonal_scatter(bias, 0)
torch.nonzero(i)
torch.nonzero(t, as_tuple=True)
torch.argwhere(t)
t.nonzero().shape
torch.where(t)
x.narrow(1, 1, 3)
x.unbind(1)
x.split(2)
x.split([1, 3], 0)
x.chunk(3, 1)
torch.tensor_split(x, 3, 1)
torch.hsplit(x[:, :4], 2)
torch.cat([x, y])
torch.cat([x, i], 1)
torch.cat([empty, x[:, :3]])
torch.stack([x, y], 1)
torch.hstack([x, y])
torch.vstack([x, y])
torch.dstack([x, y])
torch.column_stack([v, v])
torch.roll(x, 1, 0)
torch.roll(x, (1, 2), (0, 1))
torch.flip(x, [0])
torch.fliplr(x)
torch.rot90(x)
x.repeat(2, 3)
x.repeat_interleave(2, 0)
x.repeat_interleave(torch.tensor([1, 0, 2, 1], device=dev), 0)
x.tile(2)
torch.tril(x)
torch.triu(x, 1)
torch.diag(v)
torch.diag(m)
torch.diag_embed(v)
torch.diagflat(v)
torch.block_diag(x, y)
torch.meshgrid(rows, cols, indexing="ij")
torch.cartesian_prod(rows, cols)
torch.combinations(v)
torch.broadcast_tensors(x, v)
torch.atleast_2d(v)
torch.swapaxes(b, 0, 2)
b.movedim(0, -1)
b.flatten(1)
x.unflatten(1, (5, 1))
b.reshape(-1)
b.transpose(0, 2).reshape(-1)
b.ravel()
x.view(2, 10)
x.view(torch.int32)
x.view(torch.uint8)
b.squeeze()
x.unsqueeze(1).squeeze(1)
F.pad(x, (1, 2))
F.pad(img, (1, 1, 2, 0), mode="reflect")
F.pad(img, (1, 1, 1, 1), mode="replicate")
F.pad(img, (1, 1, 1, 1), mode="circular")
F.pad(x, (1, -1), value=-2.0)
F.one_hot(label)
F.one_hot(label, 9)
"""


@pytest.mark.row("M9")
@pytest.mark.filterwarnings("ignore:index_reduce")
@on_places(INDEX)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)
