"""Short names of models."""

from __future__ import annotations

DEMO = "demo"
"""The bundled pair, for `tandem up`, which gives each service the folder of its model."""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, for every service; `tandem up` drafts with its bundled head."""
NAMES = (SMOLLM2,)
"""The names that a service takes in place of a folder."""
