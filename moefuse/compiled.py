"""What `moefuse.compile` makes of a module; not in its file, for `import moefuse` doesn't load Dynamo.

In: the module, and what runs it. Out: a module with its attributes and state, whose copies and pickles are compiled
as it is: torch's own class would forget the loop front end in both.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from moefuse.onegraph import compile


class CompiledModule(OptimizedModule):
    """arguments: of `moefuse.compile`, to do it again. run: calls the model."""

    def __init__(
        self, model: nn.Module, context: Any, run: Callable[..., Any], arguments: dict[str, Any]
    ) -> None:
        super().__init__(model, context)
        self.forward = run
        self.__dict__["_moefuse_arguments"] = arguments  # set as an attribute it would go to the model

    def __reduce__(self) -> Any:
        return _compiled_again, (self._orig_mod, self.__dict__["_moefuse_arguments"])


def _compiled_again(model: nn.Module, arguments: dict[str, Any]) -> Callable[..., Any]:
    return compile(model, **arguments)
