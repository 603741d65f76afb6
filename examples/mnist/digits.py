"""What the examples beside this file train: logistic regression on handwritten digits, as TorchMPI's MNIST examples do.

scikit-learn's digits are 1,797 images of 8 x 8 and need no download. 1,680 of them are five batches of 336, which
divides among 2, 3, 4, 6, 7, 8, 12, 14 or 16 nodes.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

BATCH, RATE, EPOCHS = 336, 0.2, 5
SAMPLES = 5 * BATCH

_digits = load_digits()
_order = torch.randperm(len(_digits.data), generator=torch.Generator().manual_seed(0))
_images = (torch.tensor(_digits.data, dtype=torch.float32) / 16)[_order]
_labels = torch.tensor(_digits.target)[_order]

#: Images, labels, and the number of each sample, by which a program can count what it has seen.
training = TensorDataset(_images[:SAMPLES], _labels[:SAMPLES], torch.arange(SAMPLES))
images, labels = _images[SAMPLES:], _labels[SAMPLES:]


def model() -> nn.Linear:
    """The same initial values in every program."""
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def accuracy(net: nn.Module) -> float:
    """The share of test images that a module, wherever it is, gets right."""
    device = next(net.parameters()).device
    with torch.no_grad():
        return (net(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()


def local_batches(epoch: int) -> list[list[torch.Tensor]]:
    """An epoch's batches, in DistributedSampler's order, which `dt.data.distribute(..., shuffle=True)` has too."""
    sampler: torch.utils.data.DistributedSampler[object]
    sampler = torch.utils.data.DistributedSampler(training, num_replicas=1, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return [list(training[part]) for part in torch.tensor(list(sampler)).split(BATCH)]


def show(epoch: int, loss: float) -> None:
    print(f"epoch {epoch}: loss {loss:.8f}", flush=True)


loss_of = F.cross_entropy
