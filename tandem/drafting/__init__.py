"""Making proposals: shared by draft services and by targets with heads of their own."""
