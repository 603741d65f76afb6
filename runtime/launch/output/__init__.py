"""What nodes print, on its way to the user."""
