"""Says whether a process can be in a lost node's place: it computes with the same kernels, on as much memory."""

from __future__ import annotations

from ..runtime.process.tables import size
from ..runtime.protocol.commands import Abilities, Hello

#: The least share of a device's memory that one of the same kind has: hosts of one kind differ by what firmware takes.
SHARE = 0.9


def unlike(former: Hello, hello: Hello) -> str:
    """Returns what a process lacks that the one before it had, or has otherwise; empty where it can be in its place."""
    if hello.devices != former.devices:
        return f"its devices are {', '.join(hello.devices)}, and not {', '.join(former.devices)}"
    if hello.simulated != former.simulated:
        simulated, real = ("simulated", "real") if hello.simulated else ("real", "simulated")
        return f"its CUDA devices are {simulated} ones, and not {real} ones"
    if hello.torch != former.torch:
        return f"it has torch {hello.torch}, and not {former.torch}"
    for name in Abilities.__struct_fields__:
        has, had = getattr(hello.abilities, name), getattr(former.abilities, name)
        if has != had:
            return f"{_WORDS[name]}: {_value_in_words(has)}, and not {_value_in_words(had)}"
    for device, has, had in zip(hello.devices, hello.memory, former.memory, strict=False):
        if has < SHARE * had:
            return f"its {device} has {size(has)} of memory, and not {size(had)}"
    return ""


#: The fields of Abilities, in words.
_WORDS = {
    "cpu": "the instructions of its CPU",
    "onednn": "oneDNN in its torch",
    "bfloat16": "bfloat16 of oneDNN on its CPU",
    "float16": "float16 of oneDNN on its CPU",
    "cudnn": "its cuDNN",
    "cuda": "CUDA of its torch",
    "flash": "flash attention in its torch",
    "capabilities": "the compute capabilities of its GPUs",
}


def _value_in_words(value: object) -> str:
    return ("there" if value else "missing") if isinstance(value, bool) else str(value)
