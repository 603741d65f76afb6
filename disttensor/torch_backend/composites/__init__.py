"""Overrides of composite operators that would choose other kernels for proxies than for local tensors."""
