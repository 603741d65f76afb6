"""Settings of a process for itself: its signal handlers, its garbage collector, the processes that it ends with."""
