"""② Gates: detached 0/1 masks on the gain (a list in the objective, empty by default).

gate(now, b) -> keep_NT        bool
"""

from __future__ import annotations
