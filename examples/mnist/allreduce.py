"""python examples/mnist/allreduce.py [--nodes 4] [--save FILE --after STEPS] [--resume FILE]

Each node has a copy of the model and its share of each batch, and after the backward pass the gradients are averaged
over all of them, by one line: the losses of sequential.py. `--save` ends the program in the middle of an epoch, behind
so many steps; `--resume` goes on from there, on as many nodes as one likes.
"""

import argparse

import digits
import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--save")
parser.add_argument("--after", type=int, default=12)
parser.add_argument("--resume")
options = parser.parse_args()

with dt.init_master_worker(nodes=options.nodes, threads=1):
    mesh = dt.mesh(dp=options.nodes)
    net = digits.model().to(mesh.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=digits.RATE)
    loader = dt.data.distribute(digits.training, mesh, batch_size=digits.BATCH, shuffle=True)
    step, losses, before = 0, [], torch.zeros(digits.SAMPLES, dtype=torch.int64)
    seen = before.to(mesh.device)  # how often each rank has had each sample
    if options.resume:
        state = torch.load(options.resume)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step, losses, before = state["step"], state["losses"], state["seen"]
    steps = digits.SAMPLES // digits.BATCH
    while step < digits.EPOCHS * steps:
        for x, y, numbers in loader:
            optimizer.zero_grad()
            loss = digits.loss_of(net(x), y)
            loss.backward()
            dt.training.reduce_gradients(net)  # their mean: the gradient of the whole batch
            optimizer.step()
            losses.append(dt.all_reduce(loss.detach(), "avg", over="dp").item())
            seen += torch.bincount(numbers, minlength=digits.SAMPLES)
            step += 1
            if step % steps == 0:
                digits.show(step // steps - 1, sum(losses) / len(losses))
                losses = []
            if options.save and step == options.after:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
                state["seen"] = before + dt.all_reduce(seen, "sum", over="dp").cpu()
                torch.save({**state, "step": step, "losses": losses}, options.save)
                raise SystemExit
    print(f"accuracy {digits.accuracy(net):.4f}")
    times = before + dt.all_reduce(seen, "sum", over="dp").cpu()
    print(f"each sample once an epoch: {bool((times == digits.EPOCHS).all())}")
    dt.training.assert_replicas_equal(net, bitwise=True)
