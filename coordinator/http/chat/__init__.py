"""Chat templates: they come from strangers with the models, so a process of its own renders them, within bounds.

Imported by `coordinator.http` and the servicer. Only `worker` and `environment`, which run in that process, load Jinja.
"""
