"""How nodes that a job did not start find it, and prove that they may join."""
