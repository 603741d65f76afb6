"""Builds the simulated CUDA runtime for a Python's torch, and prints the library's path: ``build.py --python PY``.

It needs g++ and nm. What the runtime of that torch offers and ``runtime.cpp`` does not write becomes a function that
aborts with its name. A library that is newer than its sources is kept.
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
#: The libraries of torch and NVIDIA's wheels: what the first ones offer, and what the others want of the driver.
_FIND = """
import importlib.util, pathlib
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
for found in [*torch.parent.glob("nvidia/**/libcudart.so.*"), *torch.glob("lib/libcaffe2_nvrtc.so")]:
    print(found)
"""


def names(python: str) -> set[str]:
    """Returns the functions of CUDA's runtime, and those of its driver that torch is linked to."""
    found: set[str] = set()
    for path in subprocess.run([python, "-c", _FIND], check=True, capture_output=True, text=True).stdout.split():
        of = ["--undefined-only"] if "nvrtc" in path else ["--defined-only"]
        lines = subprocess.run(["nm", "-D", *of, path], check=True, capture_output=True, text=True).stdout
        found |= {m[1] for m in re.finditer(r" [TU] ((?:__)?cuda[A-Z]\w*|cu[A-Z]\w*)", lines)}
    if not found:
        raise SystemExit(f"{python} has no CUDA build of torch: no libcudart.so is beside it")
    return found


def build(python: str) -> Path:
    """Returns the path of the library, which is made unless it is there."""
    source = (HERE / "runtime.cpp").read_text()
    written = set(re.findall(r"^EXPORT [\w \*]*?\**(\w+)\(", source, re.M))
    unwritten = sorted(names(python) - written)
    stubs = "".join(f'EXPORT void {name}() {{ simcuda_unwritten("{name}"); }}\n' for name in unwritten)
    digest = hashlib.sha256((source + stubs).encode()).hexdigest()[:16]
    library = BUILT / f"libsimcuda-{digest}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        text, made = BUILT / f"{os.getpid()}.cpp", BUILT / f"{os.getpid()}.so"
        text.write_text(source + "\n// ---- not written\n\n" + stubs)
        # the name of the driver's library: whoever wants libcuda.so.1 finds this one, which is loaded already
        flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-fvisibility=hidden"]
        subprocess.run(
            ["g++", *flags, "-Wl,-soname,libcuda.so.1", str(text), "-o", str(made), "-ldl", "-lpthread"], check=True
        )
        text.unlink()
        made.rename(library)
    return library


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds the simulated CUDA runtime, and prints the library's path.")
    parser.add_argument("--python", default=sys.executable, help="the Python whose torch is a CUDA build")
    print(build(parser.parse_args().python))
