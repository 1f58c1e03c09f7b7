"""A model and its inputs, from a word on the command line.

In: TARGET: `package.module:factory`, `path/file.py:factory`, `hf:MODEL_TYPE`, `hf:path/to/config.json` or
`export:path/file.pt2`. Out: `Loaded`. A checkpoint's configuration becomes a model on the meta device: it has all of
the model's sizes and none of its weights, so that a machine that could never hold the model can look at it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moefuse import hf
from moefuse.terminal import one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF, EXPORT = "hf:", "export:"


class TargetError(Exception):
    """What was asked for can't be loaded; the message is the one line that the user sees."""


class Loaded(NamedTuple):
    """A module or an ExportedProgram (which has no inputs), and what to call it with."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def load(target: str, options: Mapping[str, Any]) -> Loaded:
    """What TARGET names. options: those of `hf.build` and `meta`, for an `hf:` target only.

    Raises:
        TargetError: TARGET can't be found, its factory raises, or it doesn't return what it should.
    """
    if target.startswith(HF):
        try:
            return _transformers(target.removeprefix(HF), **options)
        except Exception as error:  # transformers raises errors of its own kinds for bad configurations
            raise TargetError(f"{target}: {one_line(error)}") from error
    if options:
        raise TargetError(
            f"--layers, --set, --dtype, --tokens, --experts-implementation and --meta need an {HF} target"
        )
    if target.startswith(EXPORT):
        return _exported(Path(target.removeprefix(EXPORT)))
    factory = _factory(target)
    try:
        made = factory()
    except Exception as error:
        raise TargetError(f"{target} raised {type(error).__name__}: {one_line(error)}") from error
    return _inputs(target, made)


def _transformers(name: str, *, meta: bool = False, **options: Any) -> Loaded:
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return on_meta(checkpoint_config(path, **_taken(options, "layers", "overrides")), **options)
    if meta:
        config = hf.tiny_config(name, **_taken(options, "layers", "overrides"))
        return on_meta(config, **options)
    module, kwargs = hf.build(name, **options)
    return Loaded(module, (), kwargs)


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """These options, which are then no longer among the others."""
    return {name: options.pop(name) for name in names if name in options}


def checkpoint_config(
    path: Path, *, layers: int | None = None, overrides: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The (text) configuration in a checkpoint's `config.json`, or in the folder that holds one.

    layers: only the first of them. overrides: fields to change. Code that lies beside the file isn't run.

    Raises:
        ImportError: transformers isn't installed.
        ValueError, OSError: no such file, no configuration that transformers knows, or an unknown field.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("hf: models need the transformers package: pip install transformers") from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    full = AutoConfig.from_pretrained(str(file))
    config: PretrainedConfig = full if full.is_encoder_decoder else full.get_text_config()
    changes = dict(overrides or {})
    if layers is not None:
        changes |= _first_layers(config, layers)
    known = {*config.to_dict(), *config.attribute_map}
    for name, value in changes.items():
        if name not in known:
            raise ValueError(f"--set: {type(config).__name__} has no field {name!r}{hf.near(name, known)}")
        setattr(config, name, value)
    return config


def _first_layers(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """The depth, and what the configuration says per layer, cut to the first `layers`."""
    depth = int(config.num_hidden_layers)
    if layers > depth:
        raise ValueError(f"--layers: the configuration has {depth} layers, got {layers}")
    per_layer = {
        n: v[:layers] for n, v in config.to_dict().items() if isinstance(v, list) and len(v) == depth
    }
    return {"num_hidden_layers": layers, **per_layer}


def on_meta(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    experts_implementation: str | None = None,
    tokens: int = 16,
) -> Loaded:
    """The model of a configuration in its real sizes and eval mode, without memory for its weights.

    dtype: the configuration's own, float32 where it has none.
    """
    own = getattr(config, "dtype", None)
    chosen = dtype or (own if isinstance(own, torch.dtype) else torch.float32)
    with torch.device("meta"), warnings.catch_warnings():
        # about weights on the meta device, which can't be initialised: nobody reads them
        warnings.simplefilter("ignore")
        model = hf.instantiate(config, chosen, experts_implementation).eval()
    inputs = hf.inputs(model, tokens=tokens)
    return Loaded(
        model, (), {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    )


def _exported(path: Path) -> Loaded:
    if not path.is_file():
        raise TargetError(f"no such file: {path}")
    try:
        return Loaded(torch.export.load(path))
    except Exception as error:  # a zip file, a pickle, a schema: each has errors of its own
        raise TargetError(f"{path} isn't a program that torch.export saved: {one_line(error)}") from error


def _factory(target: str) -> Any:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(
            "TARGET must be module:factory, file.py:factory, hf:MODEL_TYPE, hf:config.json or export:file.pt2, "
            f"got {target!r}"
        )
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"importing {place} raised {type(error).__name__}: {one_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise TargetError(f"{place} has no function {name!r}")
    return factory


def _import(name: str) -> Any:
    # A console script lacks what `python -m` has: modules of the current directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} can't be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles in the file look there
    spec.loader.exec_module(module)
    return module


def _inputs(target: str, made: Any) -> Loaded:
    expected = f"{target} must return (model, args), (model, args, kwargs) or (model, kwargs)"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise TargetError(f"{expected}, got {type(made).__name__}{size}")
    model, args, kwargs = made if len(made) == 3 else (*made, {})
    if len(made) == 2 and isinstance(args, dict):
        args, kwargs = (), args
    if not callable(model):
        raise TargetError(f"{expected}; its model is a {type(model).__name__}, which can't be called")
    if not isinstance(args, tuple | list):
        raise TargetError(f"{expected}; args must be a tuple, got {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise TargetError(f"{expected}; kwargs must be a dict, got {type(kwargs).__name__}")
    return Loaded(model, tuple(args), kwargs)
