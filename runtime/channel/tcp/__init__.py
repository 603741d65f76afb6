"""The data channel "tcp": one authenticated connection between two peers."""
