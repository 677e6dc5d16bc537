"""Steps by the model's own modules and torch's attention, on any device: the reference for all other backends."""
