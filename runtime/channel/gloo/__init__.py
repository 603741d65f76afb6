"""The data channel "gloo": large payloads and collectives by torch's gloo."""
