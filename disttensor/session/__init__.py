"""The session: its nodes and their places, which of them is current, and which data channel carries what."""
