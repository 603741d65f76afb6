"""DistributedTensor: the proxy. A tensor of torch's with the remote one's metadata and no memory of its own.

A proxy's one attribute beyond torch's is its handle. Torch edits tensors behind a subclass's back (``p.data = q``,
``swap_tensors``, deepcopy); whatever does so here leaves handle and tensor in step, or refuses. What has to do with the
memory and the identity of a tensor is added by the files of storage/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from ..session.places import Place, current_node
from .meta import Handle, contiguous, make_proxies_of
from .numpy_operands import computed
from .printing import text

T = TypeVar("T")

#: The attributes that belong to a proxy, and not to the Python object that happens to be it.
OWN = ("_h", "_is_param")


class DistributedTensor(torch.Tensor):
    """A tensor that lives on a node. Made by operations, factories and ``.to("node:k")``, never by this class itself.

    Everything that torch does with a tensor works on it; what follows is what a proxy has beyond that.
    """

    _h: Handle
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "a DistributedTensor is made by factories (disttensor.zeros(2, 3)), operations or .to('node:0')"
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
        """The node that holds this tensor."""
        return self._h.meta.place.node

    def get_device(self) -> int:
        """The index of its CUDA device on that node; -1 for the node's CPU."""
        return self._h.meta.place.index

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A local copy. Waits for the node. Raises what made the tensor fail, if it did, or NodeLost."""
        return self.to("cpu", memory_format=memory_format)

    def cuda(
        self,
        device: int | str | torch.device | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> DistributedTensor:
        """A copy on a CUDA device of the node that holds this tensor (its first by default); itself if it's there."""
        place = self._place
        if device is None:
            device = place.name if place.is_cuda() else "cuda"
        target = place.session.places.at(place.node, device)
        return self.to(target.device, non_blocking=non_blocking, memory_format=memory_format)  # type: ignore[return-value]

    def dist_send(self, node: int | None = None, device: int | str | torch.device | None = None) -> DistributedTensor:
        """A copy on a node (the current one by default), on the same kind of device unless ``device`` says else."""
        place = self._place
        target = place.session.places.at(
            current_node.get() if node is None else node,
            ("cuda" if place.is_cuda() else "cpu") if device is None else device,
        )
        return self.to(target.device)  # type: ignore[return-value]

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """``torch.Tensor.new`` on this tensor's own device. (Torch would ask which device is the current one.)"""
        options: dict[str, Any] = {"dtype": self.dtype, "device": kwargs.get("device") or self.device}
        if kwargs.keys() <= {"device"}:
            if len(args) == 1 and isinstance(args[0], torch.Size):
                return torch.empty(args[0], **options)
            if all(isinstance(arg, Integral) for arg in args):
                return torch.empty(args or (0,), **options)
            if len(args) == 1 and isinstance(args[0], (Sequence, np.ndarray)):
                return torch.tensor(args[0], **options)
        return super().new(*args, **kwargs)

    # ---- what has to keep handle and tensor in step ------------------------------------------------------------------

    def __coerce_same_metadata_as_tangent__(self, meta: Any, kind: Any = None) -> torch.Tensor:
        # a compiled backward was traced with ordinary tensors of our device; proxies are that
        return self

    def record_stream(self, s: Any) -> None:
        """Nothing: a node frees memory after every use of it, on whichever stream."""

    def __copy__(self) -> torch.Tensor:
        twin = self.detach()
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_h"})
        return twin.requires_grad_(self.requires_grad)

    def set_(self, source: Any = None, storage_offset: int = 0, size: Any = None, stride: Any = ()) -> torch.Tensor:  # type: ignore[override]
        """As torch's. Here, because torch would pass on the source's storage, and a proxy has none."""
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
        """Of a local copy with ``force=True``; else a TypeError, as for a CUDA tensor."""
        if not force:
            raise TypeError(f"can't convert a tensor on {self._place} to numpy; use x.cpu().numpy()")
        return self.detach().cpu().numpy(force=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        result = computed(self, ufunc, method, inputs, kwargs)
        return self.__array__() if result is NotImplemented else result

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise TypeError(f"can't convert a tensor on {self._place} to numpy; use x.cpu().numpy()")

    def tolist(self) -> Any:
        """The values as nested lists. One transfer."""
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return text(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)


make_proxies_of(DistributedTensor)


def method(name: str) -> Callable[[T], T]:
    """Gives proxies a method, or a property, that is defined in a file above this one."""

    def give(value: T) -> T:
        setattr(DistributedTensor, name, value)
        return value

    return give


def proxy(handle: Handle) -> DistributedTensor:
    """A new proxy of a remote tensor."""
    tensor = handle.meta.make()
    tensor._h = handle
    return tensor  # type: ignore[no-any-return]


def alias(base: torch.Tensor, handle: Handle) -> DistributedTensor:
    """A new proxy that torch is to see as a view of ``base``.

    In inference mode torch wants the view of a tensor from outside it to be an ordinary tensor, too.
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
    """How an error names an operand."""
    where = str(tensor._place) if isinstance(tensor, DistributedTensor) else f"the master's {tensor.device}"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {where}"


__all__ = ["OWN", "DistributedTensor", "alias", "method", "operand_name", "proxy", "set_geometry"]
