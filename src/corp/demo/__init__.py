"""A small trained vision transformer and its data, for trying corp without downloading anything."""
