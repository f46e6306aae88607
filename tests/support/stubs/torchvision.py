"""Not torchvision: whatever of it is imported, for a machine without it where no image is looked at.

vLLM's Qwen3.5 imports it for text too, and looks at a model's class in a process of its own, so it is found by
`PYTHONPATH=tests/support/stubs`.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__path__: list[str] = []
__version__ = "0.0.0"


class _Named(type):
    """A class of which every attribute is its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})


sys.meta_path.insert(0, _Finder())
