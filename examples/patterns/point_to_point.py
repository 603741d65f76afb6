"""python examples/patterns/point_to_point.py [--backend tcp]

A message from one node to another, and a tensor. What a node's function returns is the script's to pass on; a tensor
goes from node to node directly. Prints

    Process 0: sending {'a': 10, 'b': 1.234, 'c': 'foobar'}
    Process 1: received {'a': 10, 'b': 1.234, 'c': 'foobar'}
    Process 1: received [0.0, 1.0, 2.0] of process 0
"""

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()


def make():
    return {"a": 10, "b": 1.234, "c": "foobar"}


def look(message):
    return f"received {message}"


with dt.init_master_worker(options.backend, nodes=2):
    message = dt.run(make, node=0)
    print("Process 0: sending", message)
    print("Process 1:", dt.run(look, message, node=1))

    tensor = torch.arange(3.0, device="node:0")
    received = torch.empty(3, device="node:1")
    dt.collectives.send(tensor, received)  # into one that is there already; tensor.to("node:1") makes a new one
    print(f"Process {received.get_node()}: received {received.tolist()} of process {tensor.get_node()}")
