"""What a process does to itself: its signals, its garbage collector, whom it ends with."""
