"""python examples/mnist/sequential.py

One process, with torch alone: what the other examples of this folder are compared with.
"""

import digits
import torch

net = digits.model()
optimizer = torch.optim.SGD(net.parameters(), lr=digits.RATE)
for epoch in range(digits.EPOCHS):
    losses = []
    for x, y, _ in digits.local_batches(epoch):
        optimizer.zero_grad()
        loss = digits.loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digits.show(epoch, sum(losses) / len(losses))
print(f"accuracy {digits.accuracy(net):.4f}")
