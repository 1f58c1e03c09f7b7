"""Which MoE architectures does the installed transformers have?

In: the package's source files; nothing of it is imported, since importing all its models takes minutes. Out: one
`Architecture` per class that holds experts, so that a module with two MoE families gives two.

A class *is* a set of experts when it is decorated with `use_experts_implementation`, or when it is a torch module
named `...Experts` (but not `...SharedExperts`); where a file has neither, when it is named `...MoE` or `...Moe`. The
*block* is the class that makes such an object: mostly router, experts and combination in one. Names are a hint for
what to measure and nothing else: the passes never see them.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

INTERFACE = "use_experts_implementation"
"""transformers' decorator of experts whose implementation (grouped_mm, batched_mm, ...) can be chosen."""

_HINT = re.compile(r"Experts|MoE\b|Moe\b")
_EXPERTS = re.compile(r"(?<!Shared)Experts$")
_MOE = re.compile(r"(MoE|Moe)$")
_MODULES = ("Module", "ModuleList", "ModuleDict")


@dataclass(frozen=True)
class Architecture:
    """One family of MoE layers.

    module: package below `transformers.models`. block: class that makes the experts. experts: their class.
    interface: the implementation of the experts can be chosen.
    name: the module, with the block where a module has several.
    """

    name: str
    module: str
    block: str
    experts: str
    interface: bool


@cache
def scan() -> tuple[Architecture, ...]:
    """Every architecture, by name. Raises ImportError where transformers isn't installed."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        raise ImportError("the zoo needs the transformers package: pip install transformers")
    files = sorted((Path(package.origin).parent / "models").glob("*/modeling_*.py"))
    return tuple(sorted((found for file in files for found in read(file)), key=lambda found: found.name))


def read(file: Path) -> tuple[Architecture, ...]:
    """The architectures of one file `<module>/modeling_*.py`."""
    text = file.read_text(encoding="utf-8")
    if not _HINT.search(text):
        return ()
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    experts = _experts(classes)
    pairs = [(block, made) for block, node in classes.items() for made in experts if made in _made(node)]
    module = file.parent.name
    return tuple(
        Architecture(
            name=module if len(pairs) == 1 else f"{module}/{block}",
            module=module,
            block=block,
            experts=made,
            interface=_decorated(classes[made]),
        )
        for block, made in pairs
    )


def _experts(classes: dict[str, ast.ClassDef]) -> list[str]:
    modules = {name: node for name, node in classes.items() if _is_module(node)}
    found = [name for name, node in modules.items() if _decorated(node) or _EXPERTS.search(name)]
    return found or [name for name in modules if _MOE.search(name)]


def _is_module(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] in _MODULES for base in node.bases)


def _decorated(node: ast.ClassDef) -> bool:
    return any(INTERFACE in ast.unparse(decorator) for decorator in node.decorator_list)


def _made(node: ast.ClassDef) -> set[str]:
    """Names of the classes that a class calls."""
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return {called.id for called in calls if isinstance(called, ast.Name)}
