"""The proxy of a remote tensor: its metadata, its storage, how it is made and printed."""
