from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
sys.path.insert(0, str(Path(__file__).parent))  # zoo.py
