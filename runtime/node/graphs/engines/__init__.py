"""Engines of replay: a node's ways to run a recorded Program, beside the interpreter.

    Program ──listing──> a process of its own: analysis, tracing, torch.export, AOTInductor ──> cache folder
                         (the node goes on interpreting, and loads the library from the folder once it is there)

The node itself never compiles: compiling is Python for seconds and would take the GIL from the thread that
replays, and it draws and restores torch's global generator.
"""
