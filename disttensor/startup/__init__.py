"""A session's start and growth: from the arguments of ``init_master_worker`` to nodes that answer."""
