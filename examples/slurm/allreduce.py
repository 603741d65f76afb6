"""srun -n 5 dtrun examples/slurm/allreduce.py        or, in a batch script: dtrun --launcher slurm ...

A sum over all tasks of a Slurm job: first among those of each host, then between hosts, then back to all. Step by step,
by one call that is told the hosts, and by one that finds them itself.
"""

import torch

import disttensor as dt

with dt.init_master_worker():
    world = dt.collectives.new_group()
    hosts = world.by_host()
    for host, group in hosts.items():
        print(f"{host}: nodes {', '.join(map(str, group))}")

    steps = [torch.full((4,), float(node + 1), device=f"node:{node}") for node in world]
    told, found = [tensor.clone() for tensor in steps], [tensor.clone() for tensor in steps]

    leaders = [group.nodes[0] for group in hosts.values()]
    for group, leader in zip(hosts.values(), leaders, strict=True):
        dt.collectives.reduce([steps[node] for node in group], leader)
    dt.all_reduce([steps[node] for node in leaders])
    for group, leader in zip(hosts.values(), leaders, strict=True):
        dt.broadcast([steps[node] for node in group], leader)

    dt.all_reduce(told, group=hosts)
    dt.all_reduce(found)
    print("on the last node:", *(tensors[-1].tolist() for tensors in (steps, told, found)))
