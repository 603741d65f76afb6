"""The data channel "mpi": large payloads and collectives by MPI."""
