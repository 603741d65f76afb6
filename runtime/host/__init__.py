"""What this machine has and how a host is reached: addresses, cores, GPUs, the
environment of MPI and Slurm; the interface of launchers."""
