"""The script's end: the queue of commands for each node, the link that sends them, and the nodes' reports."""
