"""The data channel "nccl": collectives of CUDA tensors by NCCL."""
