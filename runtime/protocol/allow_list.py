"""The allow-list of operators that a node runs, resolved by name. Any other name is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch._ops import OpOverload

from .errors import ProtocolError

#: Makes the memory of a tensor smaller or larger, for all that share it: what torch's compiler calls for
#: ``tensor.untyped_storage().resize_(n)``.
RESIZE_STORAGE = "inductor::resize_storage_bytes_"

#: Always allowed: torch's own operators. Users add theirs with init_master_worker(allow_ops=["torchvision::*"]).
BASE = ("aten::*", "prims::*", RESIZE_STORAGE)

#: Operators in these namespaces that reach beyond tensors (files, processes): refused all the same.
REFUSED = frozenset({"aten::from_file", "aten::_save", "aten::save"})


class AllowList:
    """The operators that a node runs. ``resolve("aten::add.Tensor")`` returns the operator, and looks it up once."""

    def __init__(self, extra: Iterable[str] = ()) -> None:
        self.patterns = (*BASE, *extra)
        self._known: dict[str, OpOverload] = {}

    def resolve(self, name: str) -> OpOverload:
        """Returns the operator. Raises ProtocolError for one that is not allowed or doesn't exist here."""
        op = self._known.get(name)
        if op is None:
            op = self._known[name] = self._find(name)
        return op

    def why_not(self, name: str) -> str:
        """Returns the reason for which ``resolve`` would raise, or an empty text."""
        try:
            self.resolve(name)
        except ProtocolError as e:
            return str(e)
        return ""

    def allows(self, name: str) -> bool:
        """Returns whether the operator's name is on the list."""
        qualified = name.partition(".")[0]
        return qualified not in REFUSED and any(fnmatchcase(qualified, p) for p in self.patterns)

    def added(self, name: str) -> bool:
        """Returns whether ``allow_ops=`` names the operator, whose library nodes have to import then."""
        return self.allows(name) and any(fnmatchcase(name.partition(".")[0], p) for p in self.patterns[len(BASE) :])

    def _find(self, name: str) -> OpOverload:
        qualified, _, overload = name.partition(".")
        if not self.allows(name):
            allowed = ", ".join(self.patterns)
            raise ProtocolError(f"operator {name} is not allowed on this node (allowed: {allowed}); see allow_ops=")
        namespace, _, base = qualified.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        op = getattr(packet, overload or "default", None)
        if not isinstance(op, OpOverload):
            raise ProtocolError(
                f"operator {name} doesn't exist on this node (torch {torch.__version__}); if it is another library's, "
                f"import that here first: disttensor.run(exec, 'import ...', node=[...])"
            )
        return op


def name_of(op: OpOverload) -> str:
    """Returns the operator's name as ``resolve`` takes it."""
    return str(op.name())
