"""python examples/patterns/hierarchical.py [--backend tcp]

A sum in two levels, as between hosts of several nodes each: within each group first, then between the groups' first
nodes, and back. Only the middle step would use the network. Then the same by one call, which takes the groups for its
group. (Where nodes are on several hosts `dt.all_reduce` goes that way by itself.) Prints

    groups: [0, 1], [2, 3]; their first nodes: [0, 2]
    within the groups: [3.0, 3.0, 7.0, 7.0]
    between their first nodes: [10.0, 3.0, 10.0, 7.0]
    back to the others: [10.0, 10.0, 10.0, 10.0]
    by one call: [40.0, 40.0, 40.0, 40.0]
"""

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    hosts = dt.collectives.new_group().split(lambda node: node // 2)  # .by_host(), where there are several
    print("groups:", ", ".join(str(list(host)) for host in hosts.values()), end="; ")
    print("their first nodes:", list(hosts.leaders))

    values = [torch.tensor(node + 1.0, device=f"node:{node}") for node in range(4)]
    for host in hosts.values():  # both at once: nothing waits here
        dt.all_reduce([values[node] for node in host], group=host)
    print("within the groups:", [x.item() for x in values])
    dt.all_reduce([values[node] for node in hosts.leaders], group=hosts.leaders)
    print("between their first nodes:", [x.item() for x in values])
    for host in hosts.values():
        dt.broadcast([values[node] for node in host], src=host.nodes[0])
    print("back to the others:", [x.item() for x in values])
    dt.all_reduce(values, group=hosts)
    print("by one call:", [x.item() for x in values])
