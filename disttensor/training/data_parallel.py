"""DataParallel: a module on a mesh whose gradients are reduced over a dim, beside the backward pass."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from ..collectives import broadcast
from ..collectives.issue import check_transport
from ..collectives.over_dims import Over
from ..errors.argument_checks import flag, needing, one_of
from ..meshes import Mesh, agree_, from_shards, varying
from ..meshes.mesh import all_dims_of, along
from ..meshes.mesh import place_of as mesh_place
from ..proxy.proxy import DistributedTensor
from ..runtime.process.spelling import shown
from .batches import WholeBatches, shares_of
from .buckets import Buckets, CommHook
from .named import Named, dims, limit_of, not_parts, on_a_mesh, place_of, without


class DataParallel(torch.nn.Module):
    """A module on a mesh that trains on each rank's own share of a batch, as DistributedDataParallel does.

    A backward pass fills buckets, of which the gradients are views, from the last parameter on. Each full bucket is
    reduced at once over a dim of the mesh, beside the rest of the pass. What comes next on the nodes, such as a step of
    an optimizer, waits for all of them, and the script waits for nothing.

        >>> mesh = dt.mesh(dp=2)
        >>> model = dt.DataParallel(torch.nn.Linear(3, 1).to(mesh.device), mesh)
        >>> model(torch.ones(4, 3)).sum().backward()    # two rows on each rank
        >>> model.module.weight.grad.tolist()           # the mean of both ranks'
        [[2.0, 2.0, 2.0]]
    """

    @needing("dt.DataParallel(model.to(mesh.device), mesh), where mesh is dt.mesh(dp=2)", "module", "mesh")
    def __init__(
        self,
        module: torch.nn.Module,
        mesh: Mesh,
        over: Over | None = None,
        *,
        op: Literal["avg", "sum"] = "avg",
        bucket_mb: float = 25.0,
        overlap: bool = True,
        accumulate: int = 1,
        shares: Sequence[float] | None = None,
        transport: torch.dtype | None = None,
        buffers: str | None = "first",
        skip: Sequence[str] = (),
        whole: bool = False,
    ) -> None:
        """Has all ranks along ``over`` take the first one's parameters and buffers; does not wait.

        Args:
            module: a module all of whose parameters are on the mesh.
            mesh: the mesh, or some of its dims: ``mesh["dp"]``.
            over: the name of a dim, or several, along which ranks have shares of a batch. Default: those of
                ``mesh["dp"]``, the only one of a mesh, or "dp".
            op: "avg", the mean of all ranks' gradients, or "sum".
            bucket_mb: megabytes (2**20 bytes) of gradients that a bucket has when it is full.
            overlap: False: what comes after a bucket's collective waits for it on the nodes.
            accumulate: only each such number of backward passes reduces; the others add to the gradients. With "avg"
                the gradient is the mean over these passes, too, so that k of them are one with a batch k times as
                large. Clear gradients after each such number only.
            shares: the number of samples of each rank along ``over``, where they differ; see the attribute.
            transport: torch.bfloat16 or torch.float16, as which gradients of more bits travel. They lose precision.
            buffers: what happens to buffers (BatchNorm's statistics) before a forward pass that follows one that
                reduces: "first", all take the first rank's; "avg", their mean; None, each keeps its own.
            skip: names of parameters, buffers or submodules that stay each rank's own.
            whole: whole batches go in and come out, as with ``torch.nn.DataParallel``, for libraries that know one
                device (accelerate, transformers' Trainer): see ``forward``.

        Raises TypeError for a module or mesh that is none, a parameter on no mesh, a transport that is no dtype of
        floats; ValueError for a parameter on another mesh, an unknown dim or name, another ``op``, ``buffers``,
        ``bucket_mb`` or ``accumulate``, where no parameter requires a gradient, or for ``whole`` with op="sum";
        NodeLost.
        """
        super().__init__()
        self.over = dims(along(mesh, over, "dp"))
        mesh = all_dims_of(mesh)
        _check(module, mesh, self.over)
        one_of("op", op, ("avg", "sum"))
        if buffers is not None:
            one_of("buffers", buffers, ("first", "avg"))
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"DataParallel: accumulate is a positive number of backward passes, not {accumulate!r}")
        if transport is not None:
            check_transport(transport, "DataParallel")
        flag("whole", whole)
        if whole and op != "avg":
            raise ValueError(
                "DataParallel: with whole=True each rank has the loss of the whole batch, which op='sum' adds up"
            )
        self.module, self.mesh = module, mesh
        self._how = buffers
        self._skipped = without(module, skip, "DataParallel")
        kept = [(name, p) for name, p in module.named_parameters() if name not in self._skipped]
        not_parts(kept, self.over, "DataParallel")
        trained = [(name, p) for name, p in kept if p.requires_grad]
        if not trained:
            raise ValueError("DataParallel: no parameter of the module requires a gradient; there is nothing to reduce")
        self._known = {id(p): (name, p, p.dtype) for name, p in module.named_parameters()}
        self._frozen = {id(p) for _, p in kept if not p.requires_grad}
        self._spread([*kept, *self._shared_buffers()])
        self._buckets = Buckets(
            trained, limit_of(bucket_mb, "DataParallel"), self.over, op, overlap, accumulate, transport
        )
        self._whole: WholeBatches | None = None
        if whole:
            self._whole = WholeBatches(mesh, self.over, "DataParallel")
            mesh_place(mesh, "DataParallel").takes_whole = True
        self._shares: tuple[float, ...] | None = None
        self._op, self._transport = op, transport
        self.shares = shares
        self._holding = False
        self._spoilt = False  #: buffers may differ, since a pass that reduces went before
        self.__class__ = _with_the_forward_of(module, type(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module does, on each rank of its own share, inside of ``dt.meshes.varying(over)``.

        Local tensors, and tensors on one node, in lists and dicts too, are cut in dimension 0, in equal parts for the
        ranks along ``over``; ranks that differ along other dims get the same. Tensors on the mesh, and those without a
        dimension, go as they are. Returns at once. ``inspect.signature`` says the module's arguments.

        With ``whole`` tensors on the mesh are cut as well: each has all samples on each rank, or one row for all of
        them. What is returned is the same on all ranks: a loss (a number with a fraction) is their mean; of a tensor
        with a row for each sample each rank has the whole one, unless a loss comes with it, and gradients are recorded.
        A batch that does not divide is computed by each rank.

        Raises ValueError for a batch that does not divide, a tensor on another mesh, or one with other rows in a whole
        batch; RuntimeError where parameters are not those of the construction.
        """
        self._same_parameters()
        self._buckets.end_failed_backward()
        if self._spoilt and self._how is not None:
            with_buffers = [buffer for _, buffer in self._shared_buffers()]
            agree_(with_buffers, self._how, self.over)
        if torch.is_grad_enabled():
            self._buckets.held = self._holding
        self._spoilt = torch.is_grad_enabled() and not self._holding
        if self._whole is not None:
            args, kwargs, share = self._whole.cut(args, kwargs)
            with varying(*self.over) if share else contextlib.nullcontext():
                return self._whole.join(self.module(*args, **kwargs), share)
        args, kwargs = shares_of((args, kwargs), self.mesh, self.over, "DataParallel")
        with varying(*self.over):
            return self.module(*args, **kwargs)

    if not TYPE_CHECKING:  # to type checkers, any name would be there

        def __getattr__(self, name: str) -> Any:
            """Returns what only the module has by this name (``config``, ``generate``), unless that is private.

            Raises AttributeError where neither has it.
            """
            try:
                return super().__getattr__(name)
            except AttributeError:
                module = self.__dict__.get("_modules", {}).get("module")
                if module is None or name.startswith("_") or not hasattr(module, name):
                    raise
            return getattr(module, name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Has backward passes only add to the gradients: those of forward passes inside of the ``with`` block.

        The next one whose forward pass lies outside reduces what has been added up.
        """
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduces gradients by a communication hook of DistributedDataParallel from now on, in the place of ``op``.

        Each full bucket goes to ``hook(state, bucket)``, whose tensors are on the mesh. The hook returns a
        ``torch.futures.Future`` of the reduced flat tensor. Those of torch.distributed.algorithms.ddp_comm_hooks call
        collectives of ``mesh.torch``, which has to be made before, and take a process group as their state or in it:
        ``mesh.torch.get_group("dp")``. None is the group of all ranks of the mesh. (torch's method.)

            >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
            >>> mesh = dt.mesh(dp=2)
            >>> model = dt.DataParallel(torch.nn.Linear(3, 1).to(mesh.device), mesh)
            >>> model.register_comm_hook(mesh.torch.get_group("dp"), fp16_compress_hook)

        Raises TypeError for a hook that can't be called, RuntimeError where there is a hook already, ValueError with
        ``shares`` or ``transport``, both of which are of the collective that the hook replaces.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook takes a function of a state and a bucket, not {shown(hook)}")
        if self._buckets.hook is not None:
            raise RuntimeError("register_comm_hook: this DataParallel has a hook, and takes one only")
        if self._transport is not None or self._shares is not None:
            what = "transport" if self._transport is not None else "shares"
            raise ValueError(f"register_comm_hook: {what} is of the collective that a hook replaces; leave it out")
        self._buckets.hook = state, hook

    def join(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: the script cuts each batch, so no rank ends before the others."""
        raise TypeError(
            "DataParallel: torch's Join is for ranks that each run out of batches by themselves, and here one script "
            'cuts each batch for all of them. dt.data.distribute(..., uneven="pad") has the last batch, too, and '
            "`model.shares = loader.counts` weighs ranks that have fewer samples of it"
        )

    join_hook = join

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The numbers of samples of the ranks along ``over``, in their order. None: all have as many.

        A rank's gradients count by its share: with losses that are each the mean over a rank's own samples the gradient
        is that of the mean over all of them. May be set before any pass: ``model.shares = loader.counts``. A rank with
        share 0 has no effect, as long as its gradients are numbers.

        Setting it raises TypeError and ValueError for what are no such numbers, ValueError with op="sum", RuntimeError
        between passes that add up (``accumulate``, ``no_sync``).
        """
        return self._shares

    @shares.setter
    def shares(self, shares: Sequence[float] | None) -> None:
        found = None if shares is None else _checked_shares(shares, self._op, self.mesh, self.over)
        if found is not None and self._whole is not None:
            raise ValueError("DataParallel: with whole=True all ranks have as many samples, and there are no shares")
        if found == self._shares:
            return
        if self._buckets.hook is not None:
            raise ValueError("DataParallel: shares weigh the collective that register_comm_hook has replaced")
        if self._buckets.added:
            raise RuntimeError(
                "DataParallel: shares change, and gradients of a backward pass with the others have not been reduced "
                "yet; reduce them first, or weigh the losses of an accumulation by yourself"
            )
        weights = None
        if found is not None and len(set(found)) > 1:
            at, whole = mesh_place(self.mesh, "DataParallel").numbered(self.over), math.fsum(found)
            weights = from_shards(self.mesh, [torch.tensor(found[i] / whole, dtype=torch.float64) for i in at])
        self._buckets.weigh(weights)
        self._shares = found

    def wait(self) -> None:
        """Waits until the nodes have reduced all gradients, and raises what has failed there meanwhile: the error of a
        rank's backward pass, NodeLost. Nothing else needs it: what comes next on the nodes waits by itself."""
        self._buckets.wait()

    def _spread(self, named: Sequence[Named]) -> None:
        with torch.no_grad():
            for _, tensor in named:
                tensor.copy_(broadcast(tensor, over=self.over))

    def _shared_buffers(self) -> list[Named]:
        return [
            (name, buffer)
            for name, buffer in self.module.named_buffers()
            if name not in self._skipped and place_of(buffer) is not None
        ]

    def _same_parameters(self) -> None:
        """Raises RuntimeError for a parameter that is not as it was at the construction: no bucket has its gradient."""
        for parameter in self.module.parameters():
            _, _, dtype = self._known.get(id(parameter), (None, None, None))
            if dtype is not parameter.dtype or (parameter.requires_grad and id(parameter) in self._frozen):
                raise RuntimeError(self._changed(parameter))

    def _changed(self, parameter: torch.nn.Parameter) -> str:
        name = next(name for name, other in self.module.named_parameters() if other is parameter)
        _, _, dtype = self._known.get(id(parameter), (None, None, None))
        what = "was added or replaced"
        if dtype is not None:
            what = f"was {dtype}" if dtype is not parameter.dtype else "did not require a gradient"
        return (
            f"DataParallel: {name!r} ({parameter.dtype}, requires_grad={parameter.requires_grad}) {what} when its "
            "buckets were made, so that its gradient is in none; make the DataParallel after such changes"
        )


def _with_the_forward_of(module: torch.nn.Module, kind: type[DataParallel]) -> type[DataParallel]:
    """Returns a subclass whose ``forward`` has the signature of a module's: libraries read it, of the class too, for
    the names of a batch and of its labels."""
    own: Any = DataParallel.forward
    if kind.forward is not own:  # a program's own, which says what it takes
        return kind
    try:
        arguments = inspect.signature(module.forward)
    except (TypeError, ValueError):  # one in C++, such as a ScriptModule's, has none
        return kind
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ordered = [this, *(p for p in arguments.parameters.values() if p.name != "self")]
    if ordered[1:] and ordered[1].kind is inspect.Parameter.POSITIONAL_ONLY:
        ordered[0] = this.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
    forward: Any = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    forward.__doc__, forward.__signature__ = own.__doc__, arguments.replace(parameters=ordered)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward})


def _checked_shares(shares: Sequence[float], op: str, mesh: Mesh, over: tuple[str, ...]) -> tuple[float, ...]:
    if op != "avg":
        raise ValueError(
            f"DataParallel: shares weigh a mean, and op is {op!r}, in which all gradients count as they are"
        )
    numbers = tuple(shares)
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        raise TypeError(f"DataParallel: shares are numbers of samples, not {shown(shares)}")
    ranks = math.prod(mesh.size(dim) for dim in over)
    if len(numbers) != ranks or not all(0 <= n < math.inf for n in numbers) or not any(numbers):
        raise ValueError(
            f"DataParallel: shares are {ranks} numbers of samples, one for each rank along {', '.join(over)} of "
            f"{mesh}, none of them below 0 and not all 0, not {numbers}"
        )
    return numbers


def _check(module: object, mesh: object, over: tuple[str, ...]) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DataParallel takes a module, not {type(module).__name__}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"DataParallel takes a mesh (dt.mesh(dp=...)), not {shown(mesh)}")
    if not over:
        raise ValueError(f"DataParallel: over names no dim; {mesh} has {', '.join(mesh.names)}")
    for dim in over:
        mesh.size(dim)
    for name, parameter in on_a_mesh(module.named_parameters(), "DataParallel"):
        there: Any = parameter
        if isinstance(there, DistributedTensor) and there.device != mesh.device:
            raise ValueError(f"DataParallel: {name!r} is on {there._place}, and not on {mesh}")
