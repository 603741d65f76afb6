"""The tree of processes that a launch makes: root, agents, fork servers, workers, and the frames between them."""
