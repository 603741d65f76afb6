"""What this machine has and how a host is reached: addresses, cores, GPUs, MPI's and Slurm's environment; what a launcher is."""
