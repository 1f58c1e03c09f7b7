"""The rows of the zoo's table: transformers architectures and styles of plain torch, and how each is built.

In: the scan, and Python files with a mapping `STYLES`. Out: `Row`s, and for one row, implementation and dtype a `Case`:
a tiny model with random weights, its inputs, and which of its modules are MoE layers.

A style is any object with `build`, which takes nothing and returns (module in eval mode, positional inputs), and
`fusable`; optional are `layers` (how many MoE layers, default 1) and `reason` (what a refusal must say).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moefuse import hf
from moefuse.onegraph import LOOP
from moefuse.zoo.scan import scan

GROUPED, BATCHED, EAGER, BARE = "grouped_mm", "batched_mm", "eager", "eager-bare"
IMPLEMENTATIONS = (GROUPED, BATCHED, EAGER, BARE)
"""What is compiled, and by whom: two of transformers' implementations by torch.compile, and the model's own code
(mostly a loop over the experts) by moefuse.compile and by bare torch.compile."""

BATCH = 2


@dataclass(frozen=True)
class Row:
    """One row: a transformers architecture (`module` is set) or a style of plain torch (`file` is set).

    variant: further inputs, a key of `_VARIANTS`. fusable: whether a node can do what the layers do; reason: words that
    the refusal of one that can't must have.
    """

    name: str
    module: str = ""
    block: str = ""
    experts: str = ""
    interface: bool = False
    variant: str = ""
    file: str = ""
    fusable: bool = True
    reason: str = ""

    @property
    def implementations(self) -> tuple[str, ...]:
        """Those that the row's models have."""
        return IMPLEMENTATIONS if self.interface else (EAGER, BARE)


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model to compile.

    inputs(tokens, seed): arguments of a call. layers: the experts of each MoE layer by the path of the layer; others:
    paths of MoE layers that belong to another row. count: how many layers there are where no paths are known.
    """

    module: nn.Module
    inputs: Callable[[int, int], Call]
    layers: Mapping[str, nn.Module]
    others: frozenset[str] = frozenset()
    count: int | None = None
    generates: bool = False


def _image_tokens(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every third token belongs to an image."""
    kinds = (torch.arange(kwargs["input_ids"].shape[-1]) % 3 == 1).int().expand_as(kwargs["input_ids"])
    return kwargs | {"moe_mm_token_type_ids": kinds}


_Vary = Callable[[dict[str, Any]], dict[str, Any]]
# Per module, further inputs that reach experts which the usual ones don't; each is a row of its own.
_VARIANTS: dict[str, dict[str, _Vary]] = {"ernie4_5_vl_moe": {"image tokens": _image_tokens}}

# Rows whose layers no node can do, and what their refusal must say.
_REFUSED = {
    "doge": "rank one",
    "jetmoe/JetMoeMoA": "each expert is one product",
    "nllb_moe": "capacity",
    "switch_transformers": "capacity",
    "vitpose_backbone": "each expert is one product",
}


def rows(styles: Sequence[Path] = ()) -> tuple[Row, ...]:
    """Every row, transformers first. Raises ImportError without transformers, ValueError for a bad file of styles."""
    return (*_architectures(), *(row for file in styles for row in _styles(file)))


def _architectures() -> Iterator[Row]:
    for found in scan():
        row = Row(found.name, found.module, found.block, found.experts, found.interface)
        if row.name in _REFUSED:
            row = replace(row, fusable=False, reason=_REFUSED[row.name])
        yield row
        for variant in _VARIANTS.get(row.module, ()):
            yield replace(row, name=f"{row.name}/{variant}", variant=variant)


def _styles(file: Path) -> Iterator[Row]:
    for name, style in registry(file).items():
        yield Row(f"style/{name}", file=str(file), fusable=style.fusable, reason=getattr(style, "reason", ""))


def registry(file: Path) -> Mapping[str, Any]:
    """The mapping STYLES of a Python file. Raises ValueError where there is none."""
    import runpy

    if not file.is_file():
        raise ValueError(f"styles: no such file: {file}")
    # The file may import its neighbours by the name of the folder that holds their package.
    sys.path[:0] = [path for path in (str(Path.cwd()),) if path not in sys.path]
    styles = runpy.run_path(str(file)).get("STYLES")
    if not isinstance(styles, Mapping):
        raise ValueError(f"styles: {file} has no mapping STYLES, got {type(styles).__name__}")
    return styles


def build(row: Row, implementation: str, dtype: torch.dtype) -> Case:
    """The row's tiny model. Raises ValueError where it can't be built."""
    return _style_case(row, dtype) if row.file else _transformers_case(row, implementation, dtype)


def _style_case(row: Row, dtype: torch.dtype) -> Case:
    style = registry(Path(row.file))[row.name.removeprefix("style/")]
    module, args = style.build()
    module.to(dtype)

    def inputs(tokens: int, seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        return tuple(pytree.tree_map(lambda value: _resized(value, tokens, generator, dtype), args)), {}

    return Case(module.eval(), inputs, {}, count=getattr(style, "layers", 1))


def _resized(value: Any, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Any:
    """Another input of the same kind: `tokens` long in the last dimension but the features."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        shape = (*value.shape[:-2], tokens, value.shape[-1])
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(int(value.max()) + 1, (*value.shape[:-1], tokens), generator=generator)


def _transformers_case(row: Row, implementation: str, dtype: torch.dtype) -> Case:
    model = _model(row, implementation, dtype)
    families = {arch.experts for arch in scan() if arch.module == row.module}
    layers: dict[str, nn.Module] = {}
    others = set()
    for path, block in model.named_modules():
        for child in block.children():
            if type(child).__name__ == row.experts and type(block).__name__ == row.block:
                layers[path] = child
            elif type(child).__name__ in families:
                others.add(path)
    if not layers:
        raise ValueError(f"{row.name}: {type(model).__name__} has no {row.block}")
    vary: _Vary = _VARIANTS[row.module][row.variant] if row.variant else dict

    def inputs(tokens: int, seed: int) -> Call:
        return (), vary(hf.inputs(model, tokens=tokens, batch=BATCH, seed=seed))

    generates = hasattr(model, "generate") and bool(model.can_generate())
    return Case(model, inputs, layers, frozenset(others - layers.keys()), generates=generates)


def _model(row: Row, implementation: str, dtype: torch.dtype) -> Any:
    """The first of the module's models that has the row's block: its text model, another part, or the whole."""
    setting = None
    if row.interface:
        setting = LOOP if implementation in (EAGER, BARE) else implementation
    types = hf.model_types(row.module)
    failed: Exception | None = None
    for model_type, whole in [(name, False) for name in types] + [(name, True) for name in types[:1]]:
        try:
            model, _ = hf.build(model_type, dtype=dtype, experts_implementation=setting, whole=whole)
        except Exception as error:  # another part of a multimodal model may be buildable
            failed = failed or error
            continue
        if any(type(module).__name__ == row.block for module in model.modules()):
            return model
    tried = ", ".join(types) or "none"
    why = f" ({' '.join(str(failed).split())})" if failed else ""
    raise ValueError(f"{row.name}: no model has {row.block}; model types tried: {tried}{why}") from failed
