"""What every data channel and every launcher has to do, as tests that need nothing but torch."""
