"""Drafting heads for the demo target: `eagle3`, `medusa`."""
