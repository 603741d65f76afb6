"""The protocol of the control connection: commands, their bytes, keys, names and errors, for both ends."""
