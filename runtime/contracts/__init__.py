"""The contracts of data channels and launchers, as tests that need nothing but torch."""
