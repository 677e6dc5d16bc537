"""Keys and values in pages: writing and reading them, and attention to them by torch. Backends import it."""
