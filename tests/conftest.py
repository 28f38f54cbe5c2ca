"""Settings of the whole suite: no network, no clock, and every random example the same in each run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `import oracle`, `import batches`, from any folder of tests

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")
