"""Where things are in the source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO_TARGET = ROOT / "models" / "demo" / "target"
DEMO_DRAFT = ROOT / "models" / "demo" / "draft"
HELD_OUT_PROMPTS = ROOT / "models" / "demo" / "heldout_prompts.json"
