"""Tests of what reports show."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # so that made_up_runs is found in any import mode
