"""Where things are in the source tree, and where models run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO_TARGET = ROOT / "models" / "demo" / "target"
DEMO_DRAFT = ROOT / "models" / "demo" / "draft"
DEMO_EAGLE3 = ROOT / "models" / "demo" / "eagle3"
SMOLLM2_EAGLE3 = ROOT / "models" / "smollm2" / "eagle3"
HELD_OUT_PROMPTS = ROOT / "models" / "demo" / "heldout_prompts.json"

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Device of the models that tests run in their own process; `make test-gpu` names a GPU."""
