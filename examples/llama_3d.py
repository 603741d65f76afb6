"""python examples/llama_3d.py

A Llama on eight nodes in three dims: a pipeline of two stages (pp), each of which is data parallel (dp) and tensor
parallel (tp), two by two. The model is a plain one. A plan says which of its layers are cut along tp, two lines cut it
in stages, and `pipeline.step` stands for the forward pass, the loss and the backward pass. After three steps it is
saved, and goes on in another shape: four stages, each of them cut along tp. All the losses are those of one process.
"""

import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt

VOCABULARY, WIDTH, HEADS, KEYS, HIDDEN, LAYERS, LENGTH = 65, 32, 4, 2, 86, 6, 16
#: As torchtitan's and the transformers library's for a Llama: q, k, v, gate and up by their outputs, o and down by
#: their inputs.
PLAN = {"[qkv]": "column", "o": "row", "gate": "column", "up": "column", "down": "row"}


class Block(nn.Module):
    """Attention with grouped queries and rotary positions, and a gated network."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.first, self.second = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.q, self.o = nn.Linear(WIDTH, HEADS * size, bias=False), nn.Linear(HEADS * size, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(size // 2) * 2 / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads(self, x: torch.Tensor, turn: bool = True) -> torch.Tensor:
        x = x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # all heads, or those of this rank along tp
        if not turn:
            return x
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = self.heads(self.q(y)), self.heads(self.k(y)), self.heads(self.v(y), turn=False)
        k, v = (each.repeat_interleave(HEADS // KEYS, 1) for each in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def llama() -> list[nn.Module]:
    """The layers, one after the other."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False))
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), head]
    return [layer.double() for layer in layers]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(VOCABULARY, (16, 1), generator=torch.Generator().manual_seed(step))
    text = (starts + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Training:
    """A model on a mesh of pp, dp and tp, with its optimizer."""

    def __init__(self, mesh: dt.meshes.Mesh) -> None:
        layers, stages = llama(), mesh.size("pp")
        places = [mesh.slice(pp=k) for k in range(stages)]
        for i, layer in enumerate(layers):
            plan = "row" if i == 0 else {"1": "colwise_gather_output"} if i == len(layers) - 1 else PLAN
            layers[i] = dt.nn.parallelize(layer, places[i * stages // len(layers)]["tp"], plan)
        parts = [[layer for i, layer in enumerate(layers) if i * stages // len(layers) == k] for k in range(stages)]
        self.pipeline = dt.training.Pipeline([nn.Sequential(*part) for part in parts], places, microbatches=4)
        self.model = nn.Sequential(*layers)  # the same layers, by the same names in every shape
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = self.pipeline.step(*batch(step), loss_of)  # gradients, as of loss.backward()
        self.optimizer.step()
        return loss.item()


with dt.init_master_worker(nodes=8, threads=1), tempfile.TemporaryDirectory() as folder:
    training = Training(dt.mesh(pp=2, dp=2, tp=2))
    print(training.model[1].q, "on", training.model[1].q.mesh)
    losses = [training.step(k) for k in range(3)]
    dt.checkpoint.save(training.state, folder)
    training = Training(dt.mesh(pp=4, dp=1, tp=2))
    dt.checkpoint.load(training.state, folder)
    losses += [training.step(k) for k in range(3, 6)]

alone = nn.Sequential(*llama())
optimizer = torch.optim.AdamW(alone.parameters(), lr=0.02)
for k, there in enumerate(losses):
    x, y = batch(k)
    optimizer.zero_grad()
    here = loss_of(alone(x), y)
    here.backward()
    optimizer.step()
    print(f"step {k}: loss {there:.6f} on 8 nodes, {here.item():.6f} in one process")
    assert abs(there - here.item()) < 1e-10
