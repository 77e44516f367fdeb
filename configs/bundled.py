"""Paths of the files that come with Tandem: the demo model and its adapters."""

from pathlib import Path

DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
DEMO_MODEL = DEMO_FOLDER / "model"
