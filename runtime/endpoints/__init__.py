"""Messages between a job and other programs, which are not its nodes: through tunnels (transport/), without pickle."""
