"""What files hold, as validated types.  Imports no torch."""
