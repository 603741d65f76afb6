"""A mesh as torch's own DeviceMesh: process groups whose collectives are those over its dims, and numbers of ranks."""
