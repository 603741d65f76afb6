"""Streams of a node: commands become tasks of lanes, which are threads or CUDA streams."""
