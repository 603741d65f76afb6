"""The script's end: what waits to be sent to each node, the link that sends it, what comes back."""
