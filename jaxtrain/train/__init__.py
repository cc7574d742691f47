"""State, loss and step as pure functions, and the loop around them.

The package is callable, because both `jaxtrain.train(config)` and `import jaxtrain.train.step` are what people
write, and importing a subpackage binds its name on the parent.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        from jaxtrain.train import loop

        return loop.train(config, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
