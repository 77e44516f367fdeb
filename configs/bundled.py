"""Files that come with Tandem: the demo model, its adapters, and the switches of Ray."""

from pathlib import Path

DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
DEMO_MODEL = DEMO_FOLDER / "model"
SWITCHES = Path(__file__).resolve().parent / "switches.env"


def read_switches() -> dict[str, str]:
    """Read the environment that every Ray for Tandem is started with, whoever starts it."""
    lines = (line.strip() for line in SWITCHES.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
