"""GRPO and its descendants as one formula with seven orthogonal knobs. Start reading at `objective.py`."""

__version__ = "0.1.0"

# Raised by hand when the golden trajectory (tests/golden) changes: recorded runs of an older number are not reused.
NUMERICS = 2
