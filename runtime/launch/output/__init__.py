"""The output of nodes, on its way to the user."""
