"""python examples/mnist/ps_easgd_dataparallel.py

Elastic averaging between groups of three nodes, of two and of one. In a group each node has its share of the group's
part of a batch, and gradients are averaged (dt.DataParallel); the first node of each group deals with the parameter
server, and what it takes goes from node to node in its group.
"""

import digits

import disttensor as dt
from disttensor.training import EASGD, ParameterServer, Schedule, assert_replicas_equal, drive

GROUPS = [[0, 1, 2], [3, 4], [5]]
batches = [batch for epoch in range(digits.EPOCHS) for batch in digits.local_batches(epoch)]


def step(worker, t):
    x, y = (part.split([168, 112, 56])[worker.index] for part in batches[t - 1][:2])  # 56 rows for each node
    loss = digits.loss_of(worker.module(x), dt.shard(y, worker.module.mesh, dp=0))
    loss.backward()
    return loss


with dt.init_master_worker(nodes=6, threads=1):
    server = ParameterServer(digits.model(), nodes=[nodes[0] for nodes in GROUPS])
    groups = []
    for nodes in GROUPS:
        mesh = dt.mesh(dp=len(nodes), nodes=nodes)
        groups.append(dt.DataParallel(digits.model().to(mesh.device), mesh))
    strategy = EASGD(server, Schedule(every=2), beta=0.9, momentum=0.9, local=digits.RATE)
    history = drive(groups, step, strategy, steps=len(batches))
    for epoch in range(digits.EPOCHS):
        found = [loss for losses in history.losses for loss in losses[5 * epoch : 5 * epoch + 5]]
        digits.show(epoch, sum(found) / len(found))
    centre = digits.model()
    server.pull(into=centre)
    print(f"accuracy {digits.accuracy(centre):.4f} of the centre")
    for group in groups:
        assert_replicas_equal(group, bitwise=True)
    print("the replicas of each group are equal, to the bit")
