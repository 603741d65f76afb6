"""python examples/ipc/producers_consumers.py

torch-ipc's example of producers and consumers: two functions at once on one node make items, two on another take them,
and one channel is between them. None of them knows how many there will be: the script closes the channel when it has
seen enough. That ends the producers at their next item, and the consumers once they have taken what is left. Prints

    the script has seen 40 items, and closes the channel
    2 producers and 2 consumers have ended
    each item was taken once, those of each producer in their order: True
"""

import torch

import disttensor as dt


def produce(items, name):
    made = 0
    try:
        while True:
            items.put((name, made, torch.full((2,), made)))  # waits while four are there
            made += 1
    except dt.tasks.ShutDown:
        return made


def consume(items, seen):
    taken = []
    for name, number, tensor in items:  # until it is closed and empty
        assert tensor.tolist() == [number, number]
        taken.append((name, number))
        seen.put(len(taken))
    return taken


with dt.init_master_worker(nodes=2):
    items, seen = dt.tasks.Channel(maxsize=4), dt.tasks.Channel()
    producers = [dt.submit(produce, items, name, node=0, beside=True) for name in "ab"]
    consumers = [dt.submit(consume, items, seen, node=1, beside=True) for _ in range(2)]
    for _ in range(40):
        seen.get()
    print("the script has seen 40 items, and closes the channel")
    items.close()

    made = {name: work.result() for name, work in zip("ab", producers, strict=True)}
    taken = [work.result() for work in consumers]
    print(len(made), "producers and", len(taken), "consumers have ended")
    once = sorted(taken[0] + taken[1]) == [(name, number) for name in "ab" for number in range(made[name])]
    of_each = [[number for name, number in one if name == other] for one in taken for other in "ab"]
    in_order = all(numbers == sorted(numbers) for numbers in of_each)
    print("each item was taken once, those of each producer in their order:", once and in_order)
