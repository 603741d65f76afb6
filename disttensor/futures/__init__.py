"""Values on their way to the script, which it need not wait for."""
