"""Builds the simulated CUDA runtime and NCCL for a Python's torch, and prints what to preload: ``--python PY``.

It needs g++ and nm. What the libraries of that torch offer and ours do not write becomes a function that aborts with
its name. A library that is newer than its sources is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: Where libraries go; git ignores it.
BUILT = HERE.parent.parent / "build" / "simcuda"
#: The libraries of torch and NVIDIA's wheels: what the first ones offer, and what the last one wants of the driver.
_FIND = """
import importlib.util, pathlib
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
nvidia = torch.parent / "nvidia"
for name in ("libcudart.so.*", "libnccl.so.*"):
    print(*nvidia.glob(f"**/{name}"))
print(*torch.glob("lib/libcaffe2_nvrtc.so"))
"""
_FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fwrapv", "-Wall", "-Wextra", "-fvisibility=hidden"]


def _names(library: str) -> set[str]:
    """Returns the functions of CUDA's runtime, of its driver or of NCCL that a library offers, or that it wants."""
    of = "--undefined-only" if "nvrtc" in library else "--defined-only"
    lines = subprocess.run(["nm", "-D", of, library], check=True, capture_output=True, text=True).stdout
    return {m[1] for m in re.finditer(r" [TUW] ((?:__)?cuda[A-Z]\w*|cu[A-Z]\w*|p?nccl[A-Z]\w*)", lines)}


def _build(source: Path, stem: str, soname: str, wanted: set[str]) -> Path:
    text = source.read_text()
    written = set(re.findall(r"^EXPORT [\w \*]*?\**(\w+)\(", text, re.M))
    stubs = "".join(f'EXPORT void {name}() {{ simcuda_unwritten("{name}"); }}\n' for name in sorted(wanted - written))
    text += "\n// ---- not written\n\n" + stubs
    digest = hashlib.sha256((text + " ".join(_FLAGS)).encode()).hexdigest()[:16]
    library = BUILT / f"lib{stem}-{digest}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        whole, made = BUILT / f"{os.getpid()}.cpp", BUILT / f"{os.getpid()}.so"
        whole.write_text(text)
        # whoever wants the library of that name finds this one, which is loaded already
        name = f"-Wl,-soname,{soname}"
        subprocess.run(["g++", *_FLAGS, name, str(whole), "-o", str(made), "-ldl", "-lpthread"], check=True)
        whole.unlink()
        made.rename(library)
    return library


def build(python: str) -> list[Path]:
    """Returns the paths of the libraries, in the order to preload them. Each is made unless it is there."""
    found = subprocess.run([python, "-c", _FIND], check=True, capture_output=True, text=True).stdout.split()
    of_nccl = {path for path in found if "libnccl" in path}
    if not set(found) - of_nccl:
        raise SystemExit(f"{python} has no CUDA build of torch: no libcudart.so is beside it")
    cuda = set().union(*(_names(path) for path in set(found) - of_nccl))
    nccl = set().union(*(_names(path) for path in of_nccl))
    return [
        _build(HERE / "runtime.cpp", "simcuda", "libcuda.so.1", cuda),
        _build(HERE / "nccl" / "nccl.cpp", "simnccl", "libnccl.so.2", nccl),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Builds the simulated CUDA runtime and NCCL, and prints what to preload."
    )
    parser.add_argument("--python", default=sys.executable, help="the Python whose torch is a CUDA build")
    print(":".join(map(str, build(parser.parse_args().python))))
