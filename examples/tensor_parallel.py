"""python examples/tensor_parallel.py

A transformer block whose layers are cut in two (tensor parallel), twice (data parallel): four nodes that are one mesh,
dp x tp, driven by one script. Of the nodes along tp each holds half of the heads, of the hidden features and of the
vocabulary; along dp each pair has half of the batch. The modules are those of the plain model with `mesh=` beside the
sizes, and neither 65 letters nor 33 hidden features can be halved. At the end one process trains the plain model with
whole batches: the losses and the weights are the same but for rounding.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt

LETTERS, WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 65, 16, 4, 33, 12, 8


def wide(inputs: int, outputs: int, mesh: dt.meshes.Mesh | None, bias: bool = True) -> nn.Module:
    """A layer that is cut by its outputs: each rank along tp gets some of the heads, or of the hidden features."""
    if mesh is None:
        return nn.Linear(inputs, outputs, bias)
    return dt.nn.ColumnParallelLinear(inputs, outputs, bias, gather_output=False, mesh=mesh)


def narrow(inputs: int, outputs: int, mesh: dt.meshes.Mesh | None) -> nn.Module:
    """A layer that is cut by its inputs, which come from a wide one; all ranks get the sum."""
    if mesh is None:
        return nn.Linear(inputs, outputs)
    return dt.nn.RowParallelLinear(inputs, outputs, input_is_parallel=True, mesh=mesh)


class Block(nn.Module):
    def __init__(self, mesh: dt.meshes.Mesh | None) -> None:
        super().__init__()
        device = mesh.device if mesh else "cpu"
        self.first, self.second = nn.LayerNorm(WIDTH, device=device), nn.LayerNorm(WIDTH, device=device)
        self.q, self.v = wide(WIDTH, WIDTH, mesh), wide(WIDTH, WIDTH, mesh)
        self.k = wide(WIDTH, WIDTH, mesh, bias=False)  # softmax does not see it: its gradient would be rounding alone
        self.out = narrow(WIDTH, WIDTH, mesh)
        self.up, self.down = wide(WIDTH, HIDDEN, mesh), narrow(HIDDEN, WIDTH, mesh)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # all heads, or those of this rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = self.heads(self.q(y)), self.heads(self.k(y)), self.heads(self.v(y))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def model(mesh: dt.meshes.Mesh | None) -> nn.Sequential:
    torch.manual_seed(0)  # the parallel modules draw what the plain ones do
    if mesh is None:
        return nn.Sequential(nn.Embedding(LETTERS, WIDTH), Block(mesh), nn.Linear(WIDTH, LETTERS))
    embedding = dt.nn.ParallelEmbedding(LETTERS, WIDTH, mesh=mesh)
    return nn.Sequential(embedding, Block(mesh), dt.nn.ColumnParallelLinear(WIDTH, LETTERS, mesh=mesh))


def fit(mesh: dt.meshes.Mesh | None, steps: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the checkpoint afterwards."""
    net = model(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    letters = torch.randint(LETTERS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    x, y = letters[:, :-1].contiguous(), letters[:, 1:].contiguous()
    if mesh:
        x, y = dt.shard(x, mesh, dp=0), dt.shard(y, mesh, dp=0)  # half of the batch for each dp, alike along tp
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        if mesh:
            for p in net.parameters():
                dt.collectives.all_reduce_(p.grad, "avg", over="dp")  # and nothing over tp
        optimizer.step()
        losses.append((dt.all_reduce(loss.detach(), "avg", over="dp") if mesh else loss).item())
    return losses, {name: value.cpu() for name, value in net.state_dict().items()}


with dt.init_master_worker(nodes=4, threads=1):
    mesh = dt.mesh(dp=2, tp=2)
    print(model(mesh)[2])
    losses, there = fit(mesh)
alone, here = fit(None)

for step, (parallel, plain) in enumerate(zip(losses, alone, strict=True)):
    print(f"step {step}: loss {parallel:.4f} on 4 nodes, {plain:.4f} in one process")
print(
    "a checkpoint of the plain shapes:", {n: v.shape for n, v in there.items()} == {n: v.shape for n, v in here.items()}
)
print("same losses:", torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-4))
print("same weights:", all(torch.allclose(there[name], here[name], atol=1e-5) for name in here))
