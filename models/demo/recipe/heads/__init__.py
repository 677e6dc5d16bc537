"""Drafting heads for the demo target: `eagle3`, `medusa`, and what measures them."""
