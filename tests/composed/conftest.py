"""Ranks import `composed_workers` by name, so its folder must be on their path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
