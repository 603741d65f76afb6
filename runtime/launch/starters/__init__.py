"""The ways to start agents and nodes, a file for each: on this host, by ssh, Slurm, MPI, Ray, or by themselves."""
