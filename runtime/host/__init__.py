"""This machine and host: addresses, cores, GPUs, the environment of MPI and Slurm; the interface of launchers."""
