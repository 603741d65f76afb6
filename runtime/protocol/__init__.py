"""What both ends of the control connection agree on: commands, their bytes, keys, names and errors."""
