"""Stand-ins for packages that a peer imports at the top of a file and never calls here (CUDA kernels, launchers, text tools)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = tuple(roots)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        ours = any(name == root or name.startswith(f"{root}.") for root in self.roots)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub has no code."""


@contextmanager
def stubbed(*roots: str) -> Iterator[None]:
    """Imports inside see the stubs; afterwards they are gone, so that no other package mistakes them for the real thing."""
    finder = _Finder(roots)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, module in sys.modules.items() if isinstance(module, _Stub)]:
            del sys.modules[name]
