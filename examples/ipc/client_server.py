"""python examples/ipc/client_server.py

torch-ipc's example of client and server: a job whose node answers two other programs. Each asks for the product of its
rows and a matrix on the node, and hears the goodbye that is for its tag. Prints

    2 clients: first, second
    first sent rows of shape (1, 2)
    second sent rows of shape (2, 2)
    first has tensor([[2., 3.]]), and heard "goodbye, first"
    second has tensor([[ 2.,  3.],
            [ 6., 11.]]), and heard "goodbye, second"
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import disttensor as dt


def client(file, tag):
    """Another program: it has no nodes, and the file is all that it was given."""
    with dt.tasks.connect(file, tag=tag) as job:  # tries again until the server is up
        job.send(torch.arange(2.0 * job.id + 2).reshape(-1, 2))
        product = torch.empty(job.id + 1, 2)
        job.recv(into=product)
        print(f'{tag} has {product}, and heard "{job.recv()}"')


def server(file):
    tags = "first", "second"
    with dt.init_master_worker(nodes=1), dt.tasks.Endpoint(file) as endpoint:
        programs = []
        for tag in tags:
            programs.append(subprocess.Popen([sys.executable, __file__, file, tag], stdout=subprocess.PIPE, text=True))
            endpoint.clients(len(programs))  # so that the first one is number 0
        print(len(endpoint.clients()), "clients:", ", ".join(each.tag for each in endpoint.clients()))

        matrix = torch.arange(4.0, device="node:0").reshape(2, 2)
        asked = sorted((endpoint.recv_any() for _ in tags), key=lambda one: one[0].id)
        for each, rows in asked:
            print(each.tag, "sent rows of shape", tuple(rows.shape))
            each.send(rows.to("node:0") @ matrix)  # fetched, and sent
        for tag in tags:
            endpoint.broadcast(f"goodbye, {tag}", tag)
        for program in programs:
            print(program.communicate()[0], end="")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        client(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            server(str(Path(folder) / "job.connection"))
