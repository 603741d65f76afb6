"""python examples/rollouts.py [--rounds 60]

Reinforcement learning: actors on nodes 2 and 3 balance poles on carts, two actors a node, and a learner on nodes 0 and
1, one place, learns from what they saw. Its weights go from the mesh to the actors, and their steps back, from node to
node: the script sees a mean per actor. In the middle node 3 is killed; two new actors are made on the node that is
left. At the end one process does the same, with the same classes, and has the same losses.
"""

import argparse
import gc
import os
import signal

import torch
import torch.nn as nn

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=60)
options = parser.parse_args()

ACTORS, CARTS, STEPS = 4, 8, 40
KILLED = options.rounds // 2  #: the round in which node 3 is killed


def new_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


class Carts:
    """Carts with poles, and the policy that pushes them left or right. It is plain PyTorch, and knows no node."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = new_policy()
        self.state = self.upright(CARTS)

    def upright(self, count: int) -> torch.Tensor:
        """Carts at rest: (position, speed, angle, speed of the angle) of each."""
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def learn(self, *weights: torch.Tensor) -> None:
        for mine, new in zip(self.policy.parameters(), weights, strict=True):
            mine.data.copy_(new)

    def push(self, right: torch.Tensor) -> torch.Tensor:
        """Does one step of 0.02 s; returns which poles have fallen. These begin anew."""
        x, v, angle, spin = self.state.unbind(1)
        force = right * 20.0 - 10.0
        sine, cosine = angle.sin(), angle.cos()
        swing = (force + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * swing) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speed = swing - 0.05 * turn * cosine / 1.1
        moved = (x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn)
        self.state = torch.stack(moved, 1)
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state[fallen] = self.upright(int(fallen.sum()))
        return fallen

    def play(self) -> torch.Tensor:
        """Plays some steps; returns for each what was seen (4 numbers), what was done, and how long it went well."""
        seen, done, fell = [], [], []
        with torch.no_grad():
            for _ in range(STEPS):
                chance = self.policy(self.state).softmax(1)[:, 1]
                right = (torch.rand(CARTS, generator=self.generator) < chance).float()
                seen.append(self.state)
                done.append(right)
                fell.append(self.push(right))
        well, after = [], torch.zeros(CARTS)
        for fallen in reversed(fell):
            after = torch.where(fallen, 0.0, 1.0 + 0.95 * after)
            well.insert(0, after)
        return torch.cat([torch.stack(seen), torch.stack(done)[..., None], torch.stack(well)[..., None]], 2).flatten(
            0, 1
        )


def loss_of(policy: nn.Module, played: torch.Tensor) -> torch.Tensor:
    """The policy gradient's loss: what was done is to be likelier, the better it went."""
    seen, done, well = played[:, :4], played[:, 4].long(), played[:, 5]
    advantage = (well - well.mean()) / (well.std() + 1e-6)
    chances = policy(seen).log_softmax(1).gather(1, done[:, None])[:, 0]
    return -(chances * advantage).mean()


# ---- on nodes --------------------------------------------------------------------------------------------------------


def arrived(work: dt.futures.Work, home: str) -> tuple[torch.Tensor, float]:
    """What an actor has played, at a node of the learner, and the mean of how well it went: that comes here."""
    played = work.result().to(home)  # type: ignore[attr-defined]
    return played, played[:, 5].mean().item()  # waits, and so finds out whether the actor's node is still there


def on_nodes() -> tuple[list[float], list[float]]:
    mesh = dt.mesh(dp=2, nodes=[0, 1])
    torch.manual_seed(0)
    model = dt.DataParallel(new_policy().to(mesh.device), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    actors = [dt.actor(Carts, seed, node=2 + seed % 2) for seed in range(ACTORS)]
    losses, means = [], []
    for step in range(options.rounds):
        weights = [weight.detach().at(dp=0) for weight in model.parameters()]
        for actor in actors:
            actor.learn(*weights)
        works = [actor.play() for actor in actors]
        if step == KILLED:
            os.kill(dt.nodes()[3]["pid"], signal.SIGKILL)
        batches, well = [], 0.0
        for i, work in enumerate(works):
            home = f"node:{i % 2}"
            try:
                played, mean = arrived(work, home)
            except dt.NodeLost as lost:
                print(f"round {step}: node {lost.rank} is lost; a new actor on node 2")
                actors[i] = dt.actor(Carts, ACTORS + i, node=2)
                actors[i].learn(*weights)
                played, mean = arrived(actors[i].play(), home)
            batches.append(played)
            well += mean / ACTORS
        shares = [torch.cat(batches[0::2]), torch.cat(batches[1::2])]  # each on its node of the learner
        optimizer.zero_grad()
        loss = loss_of(model, dt.meshes.from_shards(mesh, shares))
        loss.backward()
        optimizer.step()
        losses.append(dt.all_reduce(loss.detach(), "avg", over="dp").item())
        means.append(well)
        if step == 4:  # all is warm
            dt.channels.reset_stats()
            before = held()
    traffic, grown = dt.channels.stats(), [now - then for now, then in zip(held(), before, strict=True)]
    through = sum(row.sent.bytes + row.received.bytes for row in traffic if row.at == "master")
    print(f"from node to node {traffic.received.bytes / 1e6:.1f} MB, through the script {through} bytes")
    print(f"the script has {grown[0]} tensors more than after 5 rounds, and {max(0, grown[1]) / 2**20:.1f} MiB")
    return losses, means


def held() -> tuple[int, int]:
    """The tensors on nodes that the script has, and the bytes of its memory."""
    gc.collect()
    tensors = sum(issubclass(type(each), dt.DistributedTensor) for each in gc.get_objects())
    with open("/proc/self/statm") as file:
        return tensors, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- in one process --------------------------------------------------------------------------------------------------


def in_one_process() -> list[float]:
    torch.manual_seed(0)
    model = new_policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    actors = [Carts(seed) for seed in range(ACTORS)]
    losses = []
    for step in range(options.rounds):
        if step == KILLED:  # node 3 had actors 1 and 3
            actors[1], actors[3] = Carts(ACTORS + 1), Carts(ACTORS + 3)
        for actor in actors:
            actor.learn(*model.parameters())
        played = [actor.play() for actor in actors]
        optimizer.zero_grad()
        halves = [loss_of(model, torch.cat(played[half::2])) for half in (0, 1)]
        loss = (halves[0] + halves[1]) / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with dt.init_master_worker(nodes=4, threads=1):
        losses, means = on_nodes()
    torch.set_num_threads(1)
    alone = in_one_process()
    for step in range(0, options.rounds, 10):
        there, here = losses[step], alone[step]
        print(f"round {step}: {means[step]:.1f} steps went well; loss {there:.4f}, in one process {here:.4f}")
    assert losses == alone  # to the bit
