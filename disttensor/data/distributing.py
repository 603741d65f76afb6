"""``dt.data.distribute(dataset, where, batch_size=64)``: each sample goes to one rank, read at the script or there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from ..collectives.over_dims import Over
from ..errors.argument_checks import flag, needing, one_of, spelled, whole_number
from ..runtime.node.samples import SamplePlan
from ..runtime.process.spelling import shown
from .from_script import DatasetHere, LoaderHere
from .on_nodes import DatasetThere
from .ranks import Ranks

T = TypeVar("T")


class DistributedLoader(Generic[T]):
    """An iterable over batches that are on their ranks: what ``dt.data.distribute`` returns.

    A ``for`` over it is an epoch, the first one number 0. Several may run at once; each is an epoch of its own.
    """

    def __init__(self, source: LoaderHere | DatasetHere | DatasetThere) -> None:
        self._source = source
        self._next: dict[str, Any] = {"epoch": 0, **source.beginning}
        self._now = self._next

    def __iter__(self) -> Iterator[T]:
        state, self._next = self._next, {"epoch": self._next["epoch"] + 1, **self._source.beginning}
        self._now = {**state, "counts": None}
        return self._loop(self._now)

    def _loop(self, now: dict[str, Any]) -> Iterator[T]:
        for found in self._source.batches(
            dict(now)
        ):  # [what has changed, the batch]: no name here keeps the batch alive
            now.update(found[0])
            yield found.pop()
        now.update(self._source.ending, epoch=now["epoch"] + 1, counts=None)

    def __len__(self) -> int:
        """Returns the number of batches in a whole epoch. Raises TypeError where that is not known."""
        return len(self._source)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The number of samples that each rank has in the batch that was given last, without repeats.

        That of the loop that began last; None where no batch was given.
        """
        return self._now.get("counts")

    def set_epoch(self, epoch: int) -> None:
        """Has the next loop be this epoch: another order of samples. Without it each loop is the next epoch.

        The place from which a state was loaded stays, if it is in this epoch.
        """
        if whole_number("epoch", epoch) != self._next["epoch"]:
            self._next = {"epoch": epoch, **self._source.beginning}
        self._now = self._next

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loop that began last is, as plain data: ``load_state_dict`` goes on behind the batch that
        it has given last."""
        return {name: value for name, value in self._now.items() if name != "counts"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next loop go on where the one of a ``state_dict()`` was: with the same samples, in the same batches,
        and with the same random numbers of the dataset's.

        The number of ranks may be another one, and the batch size, too: the state is a number of samples.

        Raises ValueError for a state of another dataset's size, seed or shuffle, or of another kind of loader.
        """
        known = {"epoch", *self._source.beginning}
        if not isinstance(state, Mapping) or set(state) != known:
            what = sorted(state) if isinstance(state, Mapping) else state
            raise ValueError(f"load_state_dict: the state of this loader has {', '.join(sorted(known))}, not {what}")
        whole_number("epoch", state["epoch"])
        self._source.check(state)
        self._next = self._now = dict(state)


@spelled
@needing("dt.data.distribute(loader, dt.mesh(dp=2))", "loader_or_dataset", "where")
def distribute(
    loader_or_dataset: Any,
    where: Any,
    *,
    over: Over | None = None,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    depth: int = 2,
    at: str = "script",
    uneven: str = "drop",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    prefetch_factor: int | None = None,
) -> DistributedLoader[Any]:
    """Returns a loader whose batches are on the ranks of a mesh, or on nodes: each sample goes to one of them, once in
    an epoch.

        >>> samples = TensorDataset(torch.arange(8.0))
        >>> for (x,) in dt.data.distribute(samples, dt.mesh(dp=2), batch_size=4, at="node"):
        ...     print(x.shards())
        [tensor([0., 2.], device='node:0'), tensor([1., 3.], device='node:1')]
        [tensor([4., 6.], device='node:0'), tensor([5., 7.], device='node:1')]

    Args:
        loader_or_dataset: a dataset, with ``batch_size``; or a loader: a DataLoader, or any iterable of batches.
        where: a mesh, whose batches are tensors on it; a list of nodes, which get a list of batches, one for each; or
            one node or device.
        over: of a mesh: the name of a dim, or several. Ranks that differ along others get the same samples. Default:
            those of ``mesh["dp"]``, the only one of a mesh, or "dp".
        batch_size: the samples of a global batch, that of all ranks together, which they divide.
        shuffle: whether each epoch has another order: the one of DistributedSampler with this seed.
        seed: that of the order, and of the random numbers that a dataset draws for each sample.
        depth: the number of batches that are sent, or read by nodes, ahead of the one that the consumer has.
        at: "script": batches are read here and cut; the bytes leave from where the loader has put them, without a copy
            before that, and what workers read for nodes of this host without any. "node": each node reads its own
            samples, in worker processes, and the script gets no byte of them; the dataset goes there as an argument of
            ``dt.run`` does.
        uneven: what becomes of an end that does not divide. "drop": whole global batches only. "pad": samples are
            repeated, as by DistributedSampler; ``counts`` of the loader says how many are not. "none": ranks have
            different numbers of samples, on nodes without a mesh; None where a node has none. Of a loader at the
            script it is about each batch: rows that do not divide are left out, or repeated.
        collate_fn, num_workers, worker_init_fn, prefetch_factor: of a dataset: as for DataLoader. On nodes there is one
            worker at least.

    Raises TypeError and ValueError for arguments that don't fit, DisttensorError without a session.
    """
    one_of("at", at, ("script", "node"))
    one_of("uneven", uneven, ("drop", "pad", "none"))
    depth, seed = whole_number("depth", depth, 1), whole_number("seed", seed)
    if shuffle is not None:
        flag("shuffle", shuffle)
    options = {
        "collate_fn": collate_fn,
        "num_workers": None if num_workers is None else whole_number("num_workers", num_workers),
        "worker_init_fn": worker_init_fn,
        "prefetch_factor": prefetch_factor,
    }
    given = {name: value for name, value in options.items() if value is not None}
    ranks = Ranks(where, over)
    if batch_size is None:
        _refuse(given, shuffle, loader_or_dataset, at)
        if at == "script":
            return DistributedLoader(LoaderHere(loader_or_dataset, ranks, depth, uneven))
        dataset, batch_size, shuffles, given = _taken_apart(loader_or_dataset)
        shuffle = shuffles if shuffle is None else shuffle
    else:
        if isinstance(loader_or_dataset, DataLoader):
            raise ValueError(
                "distribute: a DataLoader has a batch_size of its own; leave out batch_size=, or give its dataset"
            )
        dataset = loader_or_dataset
    _check_dataset(dataset, bool(shuffle))
    plan = SamplePlan(ranks.size, _divided(batch_size, ranks), bool(shuffle), seed, 0, uneven, 0)
    _check_ends(dataset, plan, ranks)
    kind = DatasetHere if at == "script" else DatasetThere
    return DistributedLoader(kind(dataset, ranks, depth, plan, given))


def _refuse(given: dict[str, Any], shuffle: bool | None, loader: Any, at: str) -> None:
    if isinstance(loader, Dataset):
        raise ValueError("distribute: a dataset needs batch_size=, the samples of a global batch")
    if at == "node" and not isinstance(loader, DataLoader):
        raise TypeError(
            f"distribute(at='node') takes a dataset with batch_size=, or a DataLoader, not {type(loader).__name__}: "
            "nodes read by themselves"
        )
    if given:
        raise ValueError(
            f"distribute: {', '.join(given)} are those of a dataset with batch_size=; a loader has its own"
        )
    if at == "script" and shuffle is not None:
        raise ValueError("distribute: a loader has its own order; shuffle= is for a dataset with batch_size=")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"distribute takes a dataset with batch_size=, or an iterable of batches, not {shown(loader)}")


def _taken_apart(loader: DataLoader[Any]) -> tuple[Any, int, bool, dict[str, Any]]:
    """Returns dataset, batch size, whether it shuffles, and options of a DataLoader. Raises ValueError for an order or
    batches of the user's own, which nodes don't know."""
    dataset, sampler = loader.dataset, loader.sampler
    if loader.batch_size is None:
        raise ValueError(
            "distribute(at='node'): the DataLoader has batches of its own (batch_sampler, or batch_size=None), which "
            "nodes don't know; give the dataset with batch_size=, or at='script'"
        )
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not isinstance(dataset, IterableDataset) and not shuffles and not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"distribute(at='node'): the order of the DataLoader is that of its {type(sampler).__name__}, which nodes "
            "don't know; give the dataset with batch_size= and shuffle=, or at='script'"
        )
    names = ("collate_fn", "num_workers", "worker_init_fn", "timeout", "prefetch_factor")
    options = {name: value for name in names if (value := getattr(loader, name))}
    return dataset, loader.batch_size, shuffles, options


def _check_dataset(dataset: Any, shuffle: bool) -> None:
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError(
                "distribute: an IterableDataset comes in its own order; shuffle=True is for one with indices"
            )
    elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"distribute: a dataset has __getitem__ and __len__, or is an IterableDataset, and this is a "
            f"{type(dataset).__name__}; leave out batch_size= for an iterable of batches"
        )


def _divided(batch_size: Any, ranks: Ranks) -> int:
    size = whole_number("batch_size", batch_size, 1)
    if size % ranks.size:
        raise ValueError(
            f"distribute: batch_size={size} is that of all ranks together, and does not divide among {ranks}; "
            f"{size - size % ranks.size or ranks.size} does"
        )
    return size


def _check_ends(dataset: Any, plan: SamplePlan, ranks: Ranks) -> None:
    """Raises ValueError for an end that ranks of a mesh can't have: they have one shape."""
    if plan.uneven == "none" and ranks.mesh is not None and not isinstance(dataset, IterableDataset):
        left = len(dataset) % ranks.size
        if left:
            raise ValueError(
                f"distribute(uneven='none'): {len(dataset)} samples do not divide among {ranks}, which have one shape; "
                "'drop' leaves the last batch out, 'pad' repeats samples and says how many (counts)"
            )


__all__ = ["DistributedLoader", "distribute"]
