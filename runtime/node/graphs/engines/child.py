"""The script of the process that compiles one program, and ends with the process that asked for it.

    python -P child.py SYS_PATH FOLDER THREADS < program

FOLDER appears with ``plan.json`` in it, and ``model.so`` if the program fits. The program is one line. If the standard
input ends before this process does, the process and the C++ compilers that it has started are killed.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import signal
import sys
import threading

#: Programs of more lines: the code that calls the kernels is not optimised, for that takes minutes and gains little.
LONG = 500

#: Exit codes: no C++ compiler; compiling failed, and the last line of stderr says why.
NO_COMPILER, FAILED = 3, 1


def main(path: str, folder: str, threads: str) -> int:
    gc.set_threshold(100_000)  # graphs have a million objects, which would be looked through again and again
    os.nice(5)  # replays that go on meanwhile come first
    text = sys.stdin.readline()
    threading.Thread(target=_watch, daemon=True).start()
    sys.path[:] = json.loads(path)
    # the nodes of a machine ask for the same programs at the same time
    with open(os.open(f"{folder}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):
            return 0
        draft = f"{folder}.draft"
        shutil.rmtree(draft, ignore_errors=True)  # left behind by a process that was killed
        os.makedirs(draft, mode=0o700)
        try:
            code = _compile(text, draft, int(threads))
            if code == 0:
                os.rename(draft, folder)
            return code
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _watch() -> None:
    while sys.stdin.read(1):
        pass
    os.killpg(0, signal.SIGKILL)


def _compile(text: str, folder: str, threads: int) -> int:
    import torch

    torch.set_grad_enabled(False)
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import FakeTensorMode

    from disttensor.runtime.node.graphs.engines import fitness, listing, tracing

    work = os.path.join(folder, "work")
    os.makedirs(work)
    # Inductor (2.13) leaves out copies and goes on taking the views of a copy for views of other memory than the
    # original's; then it writes the original in place before the views are read.
    for module, name in ((post_grad, "remove_noop_ops"), (joint_graph, "remove_no_ops")):
        setattr(module, name, lambda *_: None)
    try:
        program, given = listing.parse(text)
        with FakeTensorMode():
            plan = fitness.Analysis(program, given).plan
        traced = tracing.Traced(program, given, plan)
        arguments = tuple(tracing.examples(given, plan, program))
        tracing.check(traced, arguments)
        exported = torch.export.export(traced, arguments, strict=False)
        options = {
            "aot_inductor.output_path": os.path.join(work, "model.so"),
            "aot_inductor.compile_wrapper_opt_level": "O0" if len(program.lines) > LONG else "O1",
            "compile_threads": 1,
            "cpp.threads": threads,
            "fallback_random": True,
        }
        graph = exported.module(check_guards=False)
        torch._inductor.aot_compile(graph, arguments, options=options)
        found: dict[str, object] = plan.plain()
    except listing.NotCompilable as e:
        found = {"unfit": str(e)}
    except Exception as e:
        if isinstance(getattr(e, "inner_exception", e), InvalidCxxCompiler):
            return NO_COMPILER
        print(f"{type(e).__name__}: {e}".replace("\n", " ")[:2000], file=sys.stderr)
        return FAILED
    for name in os.listdir(work):
        if name in ("model.so", "model.json"):  # the second says how operators without a C interface are called
            os.rename(os.path.join(work, name), os.path.join(folder, name))
    shutil.rmtree(work)
    with open(os.path.join(folder, "plan.json"), "w") as file:
        json.dump(found, file)
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(*sys.argv[1:]))
