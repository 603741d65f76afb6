"""python examples/ipc/workqueue.py

torch-ipc's example of a queue of work: two workers find it by its name, load files of which it has the paths, and give
back what is in them. Prints

    a file with shape (1, 2)
    a file with shape (2, 2)
    a file with shape (3, 2)
    3 files were loaded
"""

import os
import tempfile

import torch

import disttensor as dt


def work():
    files, loaded = dt.tasks.WorkQueue.named("files"), 0
    for path in files:  # until it is closed, and all is done
        files.task_done(torch.load(path))
        loaded += 1
    return loaded


with dt.init_master_worker(nodes=2), tempfile.TemporaryDirectory() as folder:
    paths = [os.path.join(folder, f"f{rows}.pt") for rows in (1, 2, 3)]
    for rows, path in enumerate(paths, 1):
        torch.save(torch.randn(rows, 2), path)

    files = dt.tasks.WorkQueue(name="files")
    works = [dt.submit(work, node=node) for node in range(2)]
    files.put_many(paths)
    files.close()  # nothing more comes

    for tensor in sorted(files.answers, key=len):  # until all is done
        print("a file with shape", tuple(tensor.shape))
    print(sum(work.result() for work in works), "files were loaded")
