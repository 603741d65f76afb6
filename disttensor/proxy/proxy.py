"""DistributedTensor, the proxy: a torch tensor with the metadata of a remote one and no memory of its own.

A proxy's one attribute beyond torch's is its handle; that of a large tensor has its line as well (``_made``). Torch
edits tensors behind a subclass's back (``p.data = q``, ``swap_tensors``, deepcopy); the code here that does so keeps
handle and tensor in step, or refuses. The files of storage/ add the methods that concern a tensor's memory and its
identity.
"""

from __future__ import annotations

import copyreg
import pkgutil
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..session.node_context import destination
from ..session.places import Place
from .meta import Handle, contiguous, make_proxies_of
from .numpy_operands import computed
from .printing import text

T = TypeVar("T")

#: The attributes that belong to a proxy as a tensor, and not to its Python object.
OWN = ("_h", "_is_param", "_made")

#: What to write for an array of numpy.
_TO_NUMPY = "use x.cpu().numpy()"


class _Kind(torch._C._TensorMeta):
    """The class of proxies' classes, which are pickled by the names under which they are found."""


def _by_name(kind: _Kind) -> tuple[Callable[[str], Any], tuple[str]]:
    module = __name__ if kind is DistributedTensor else kind.__module__
    return pkgutil.resolve_name, (f"{module}:{kind.__qualname__}",)


copyreg.pickle(_Kind, _by_name)


class DistributedTensor(torch.Tensor, metaclass=_Kind):
    """A tensor that lives on a node. Operations, factories and ``.to("node:k")`` make it; the class can't be called.

    It has shape, dtype, strides and device, and all of torch's operations; they return at once. ``item``, ``cpu``,
    ``tolist`` and printing wait for the node. The methods below are those that a proxy has beyond torch's, or that it
    has to do in another way.
    """

    #: libraries for several kinds of arrays (opt_einsum, autoray) take their functions from the package that this names
    __module__ = "torch"
    _h: Handle
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "a DistributedTensor is made by factories (disttensor.factories.zeros(2, 3)), operations or .to('node:0')"
        )

    # replaced by dispatch/dispatch.py; torch wants the method to be there when the class is made
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError

    # ---- placement -------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Place:
        return self._h.meta.place

    def get_node(self) -> int:
        """Returns the number of the node that holds this tensor."""
        return self._h.meta.place.one.node

    def get_device(self) -> int:
        """Returns the index of the tensor's CUDA device on its node; -1 for the node's CPU."""
        return self._h.meta.place.index

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Returns a local copy with the same shape and dtype, and with a gradient. Waits for the node.

        Raises the error that made the tensor fail, if it did; GraphError while a graph is recorded; NodeLost.
        ``disttensor.fetch`` does not wait.
        """
        return self.to("cpu", memory_format=memory_format)

    def cuda(
        self,
        device: int | str | torch.device | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> DistributedTensor:
        """Returns a copy on a CUDA device of the node that holds this tensor; the tensor itself if it is there already.

        ``device`` is an index or a name such as "cuda:1". Default: the tensor's own CUDA device, or the node's first.
        Returns at once. Raises RuntimeError for a device that the node does not have, NodeLost.
        """
        place = self._place
        if device is None:
            device = place.name if place.is_cuda() else "cuda"
        target = place.session.places.at(place.one.node, device)
        return self.to(target.device, non_blocking=non_blocking, memory_format=memory_format)  # type: ignore[return-value]

    def dist_send(
        self, node: Any = None, device: int | str | torch.device | None = None, non_blocking: bool = False
    ) -> DistributedTensor:
        """Returns a copy on a node (the current one by default), on the same kind of device unless ``device`` names
        one.

        ``node`` is a number, or what ``to`` takes ("node:1", a device of type node) or a mesh, which is the place then;
        so is such a ``device``. Returns at once, whatever ``non_blocking`` says; the bytes go directly between the two
        nodes. The copy is differentiable; a tensor that is there already is returned itself. Raises ValueError for a
        node that does not exist, or two places, RuntimeError for a device that it does not have, NodeLost.
        """
        place = self._place
        target = destination(place.session.places, node, device, "cuda" if place.is_cuda() else "cpu")
        return self.to(target.device, non_blocking=non_blocking)  # type: ignore[return-value]

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Makes a tensor as ``torch.Tensor.new``, on this tensor's own device. (Torch would take the current
        device.)"""
        options: dict[str, Any] = {"dtype": self.dtype, "device": kwargs.get("device") or self.device}
        if kwargs.keys() <= {"device"}:
            if len(args) == 1 and isinstance(args[0], torch.Size):
                return torch.empty(args[0], **options)
            if all(isinstance(arg, Integral) for arg in args):
                return torch.empty(args or (0,), **options)
            if len(args) == 1 and isinstance(args[0], (Sequence, np.ndarray)):
                return torch.tensor(args[0], **options)
        return super().new(*args, **kwargs)

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Makes a tensor as ``torch.Tensor.new_tensor``, on this tensor's own device. (Torch would take the current
        device.)"""
        if kwargs.get("device") is None:
            kwargs["device"] = self.device
        return super().new_tensor(data, **kwargs)

    # ---- what has to keep handle and tensor in step ------------------------------------------------------------------

    def __coerce_same_metadata_as_tangent__(self, meta: Any, kind: Any = None) -> torch.Tensor:
        # a compiled backward was traced with ordinary tensors of type "node", and proxies can stand for these
        return self

    def record_stream(self, s: Any) -> None:
        """Does nothing: a node frees memory after every use of it, on whichever stream."""

    def __copy__(self) -> torch.Tensor:
        twin = self.detach()
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_h"})
        return twin.requires_grad_(self.requires_grad)

    def set_(self, source: Any = None, storage_offset: int = 0, size: Any = None, stride: Any = ()) -> torch.Tensor:  # type: ignore[override]
        """Sets this tensor to another's memory, as torch does. Torch's own method would pass on the source's storage,
        and a proxy has none."""
        if source is None:
            return torch.ops.aten.set_(self)  # type: ignore[no-any-return]
        if size is None:
            return super().set_(source)
        size = tuple(size)
        stride = tuple(stride) or contiguous(size)
        if isinstance(source, DistributedTensor):
            if not source.is_contiguous():
                raise RuntimeError("passed in tensor to be used as storage must be contiguous")  # as torch says it
            offset = int(source.storage_offset()) + storage_offset
            return super().set_(source.detach().as_strided(size, stride, offset))
        return super().set_(source, storage_offset, size, stride)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a numpy array of a local copy with ``force=True``, and waits for it; else raises TypeError, as a CUDA
        tensor does."""
        if not force:
            raise TypeError(f"can't convert a tensor on {self._place} to numpy; {_TO_NUMPY}")
        return self.detach().cpu().numpy(force=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        result = computed(self, ufunc, method, inputs, kwargs)
        return self.__array__() if result is NotImplemented else result

    def __array_function__(self, func: Any, types: object, args: Any, kwargs: Any) -> Any:
        """Does what numpy does for a tensor: calls its own method, or takes it for an array. Raises TypeError that says
        what to write where neither works."""
        try:
            return func._implementation(*args, **kwargs)
        except TypeError as e:
            if _TO_NUMPY in str(e):
                raise
            raise TypeError(
                f"numpy.{func.__name__} can't compute with a tensor on {self._place}: torch has functions that do; for "
                f"numpy's {_TO_NUMPY}"
            ) from e

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(f"can't convert a tensor on {self._place} to numpy; {_TO_NUMPY}")

    def tolist(self) -> Any:
        """Returns the values as nested lists. Waits for one transfer. Raises as ``cpu``."""
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return text(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)


make_proxies_of(DistributedTensor)


def method(name: str) -> Callable[[T], T]:
    """Returns a decorator that gives proxies a method, or a property, from a file above this one."""

    def give(value: T) -> T:
        setattr(DistributedTensor, name, value)
        return value

    return give


def proxy(handle: Handle) -> DistributedTensor:
    """Returns a new proxy of a remote tensor."""
    tensor = handle.meta.make()
    tensor._h = handle
    return tensor  # type: ignore[no-any-return]


def alias(base: torch.Tensor, handle: Handle) -> DistributedTensor:
    """Returns a new proxy that torch is to see as a view of ``base``.

    In inference mode torch wants the view of an ordinary tensor (made outside of that mode) to be an ordinary one, too.
    """
    if not torch.is_inference_mode_enabled() or base.is_inference():
        return proxy(handle)
    with torch.inference_mode(False):
        return proxy(handle)


def set_geometry(tensor: DistributedTensor, handle: Handle) -> None:
    """Gives ``tensor`` another handle with another geometry, in the C++ tensor as well."""
    like = handle.meta.make()
    # the meta kernel of set_ copies the metadata and asks for no memory
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard(), torch.no_grad():
        torch._C._set_meta_in_tls_dispatch_include(True)
        tensor.set_(like)
    tensor._h = handle


def operand_name(tensor: Any) -> str:
    """Returns an operand's name for error messages."""
    where = str(tensor._place) if isinstance(tensor, DistributedTensor) else f"the script's {tensor.device}"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {where}"


def local_name(value: object) -> str:
    """Returns what a value is that is not on a node, for error messages, with what to do if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return f"a local tensor of {value.device}; x.to('node:0') sends it to node 0"
    return type(value).__name__


def innermost(x: Any) -> Any:
    """Returns the tensor that transforms of torch.func have wrapped; anything else as it is."""
    while isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def where_is(x: object) -> Place | None:
    """Returns the place of a remote tensor, of one inside of a transform of torch.func too; None for anything else."""
    tensor = innermost(x)
    return tensor._place if isinstance(tensor, DistributedTensor) else None


def refuse_wrapper(x: object, what: str) -> None:
    """Raises TypeError, in words, for a tensor that torch makes of tensors on nodes, such as a DTensor: it is neither
    the script's nor a remote one itself."""
    if (
        isinstance(x, torch.Tensor)
        and x.device.type == "node"
        and is_traceable_wrapper_subclass(x)
        and where_is(x) is None
    ):
        raise TypeError(
            f"{what} does not take a {type(x).__name__}: of a DTensor, x.full_tensor() is the whole on all ranks, and "
            "x.to_local() each rank's part"
        )


__all__ = [
    "OWN",
    "DistributedTensor",
    "alias",
    "innermost",
    "local_name",
    "method",
    "operand_name",
    "proxy",
    "refuse_wrapper",
    "set_geometry",
    "where_is",
]


def class_of_proxies(original: object) -> Any:
    """Returns what is ``torch.DistributedTensor`` in a session."""
    return DistributedTensor
