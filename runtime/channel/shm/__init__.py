"""The data channel "shm": shared memory between processes of one host, of CUDA devices too."""
