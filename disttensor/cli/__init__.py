"""The command ``dtrun``."""
