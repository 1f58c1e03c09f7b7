"""The options of the backend: names, types, defaults, and clear errors for everything else.

In: the dict that a user gives to `torch.compile(options=...)`. Out: `Options`.
"""

import difflib
import fnmatch
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moefuse.comm.rendezvous import TIMEOUT
from moefuse.graph.groups import name_of

MODES = ("auto", "on", "off")
TORCH_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILERS = ("inner", "inner_options", "round_as_eager", "verify")
"""Options that say how a graph is compiled and run."""


class OptionError(ValueError):
    """An option that doesn't exist or has an impossible value; the message names it, and what was expected."""


@dataclass(frozen=True)
class Options:
    """What `options` may hold.

    mode: "auto" fuses what the policy allows and leaves the rest with a reason; "on" makes every rejection of a
        MoE layer an error; "off" fuses nothing.
    target: "auto", or the name of a target such as "cpu" or "reference".
    inner: the compiler of the rewritten graph: "inductor", "eager", "npugraph_ex" or "torchair"; "auto" takes
        npugraph_ex for graphs on an NPU and Inductor for others.
    inner_options: handed to the inner compiler, see `moefuse.inner.compile_inner`.
    exclude: module path patterns (as in fnmatch) of layers to leave alone, such as "model.layers.1.*".
    dump: directory for before/after graphs and verdicts, "" for none.
    round_as_eager: Inductor rounds half precision intermediates of a fused graph where eager rounds them. It leaves
        them in float32 by itself; a router makes another expert of such a difference.
    verify: on its first real inputs a graph runs each fused layer and the region it replaced. A difference that
        rounding doesn't explain is an error in mode "on"; otherwise the graph runs unfused, and the report says so.
    ep_group: the process group over which experts are spread, or its name; "" takes the group that the model's own
        collectives name. A layer whose rows travel over another group isn't fused.
    ep_max_tokens: the most tokens that a rank may bring to a layer whose experts are spread; equal on all ranks. The
        shared memory of a context grows with it. More tokens are an error on every rank.
    ep_timeout: the seconds that a rank waits for the others of such a layer, in a step or for their word; equal on all.
    meta_device: the type of the device on which a layer on the meta device is judged to be.
    """

    mode: str = "auto"
    target: str = "auto"
    inner: str = "auto"
    exclude: tuple[str, ...] = ()
    dump: str = ""
    round_as_eager: bool = True
    verify: bool = False
    meta_device: str = "cpu"
    inner_options: Mapping[str, Any] = field(default_factory=dict)
    ep_group: str = ""
    ep_max_tokens: int = 4096
    ep_timeout: float = TIMEOUT

    @staticmethod
    def parse(given: Mapping[str, Any] | None) -> "Options":
        """Check a user's options. Raises OptionError naming the option, what was expected and what came."""
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options: expected a dict of options by name, got {given!r}")
        known = {one.name: one for one in fields(Options)}
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"options: unknown option {name!r}{hint} (known: {', '.join(known)})")
            values[name] = _PARSERS[name](name, value)
        return Options(**values)

    @staticmethod
    def parse_for_pass(given: Mapping[str, Any] | None, compiler: str) -> "Options":
        """`parse` for the passes alone, on a graph that somebody else, `compiler`, compiles and runs."""
        for name in COMPILERS:
            if isinstance(given, Mapping) and name in given:
                raise OptionError(
                    f"options[{name!r}]: {compiler} compiles and runs the graph; the pass has no such option"
                )
        return Options.parse(given)

    def excluded(self, layer: str) -> str:
        """Why the layer at this module path is left alone, "" where no exclude pattern matches."""
        pattern = next((pattern for pattern in self.exclude if fnmatch.fnmatchcase(layer, pattern)), "")
        return f"excluded by the option exclude={pattern!r}" if pattern else ""


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"options[{name!r}]: expected a string, got {type(value).__name__} {value!r}")
    return value


def _directory(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise OptionError(
            f"options[{name!r}]: expected a directory's path, got {type(value).__name__} {value!r}"
        )
    return os.fspath(value)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"options[{name!r}]: expected one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def _mode(name: str, value: Any) -> str:
    if value in TORCH_MODES:
        raise OptionError(
            f"options[{name!r}]: expected one of {', '.join(MODES)}, got {value!r}, which is a mode of Inductor: "
            f"torch.compile(..., mode={value!r}), or inner_options=torch._inductor.list_mode_options({value!r})"
        )
    return _one_of(name, value, MODES)


def _target(name: str, value: Any) -> str:
    from moefuse import targets

    return _one_of(name, value, ("auto", *targets.names()))


def _inner(name: str, value: Any) -> str:
    from moefuse.inner import INNER_COMPILERS

    return _one_of(name, value, ("auto", *INNER_COMPILERS))


def _inner_options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionError(
            f"options[{name!r}]: expected a dict with the inner compiler's options by name, got {value!r}"
        )
    return dict(value)


def _exclude(name: str, value: Any) -> tuple[str, ...]:
    patterns = isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value)
    if not patterns:
        raise OptionError(f"options[{name!r}]: expected a list of module path patterns, got {value!r}")
    return tuple(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"options[{name!r}]: expected True or False, got {value!r}")
    return value


def _group(name: str, value: Any) -> str:
    found = "" if value is None else name_of(value)
    if found is None:
        raise OptionError(
            f"options[{name!r}]: expected a process group that this rank is in, or its name, got {value!r}"
        )
    return found


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise OptionError(f"options[{name!r}]: expected a positive integer, got {value!r}")
    return value


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise OptionError(f"options[{name!r}]: expected a positive number of seconds, got {value!r}")
    return float(value)


def _device(name: str, value: Any) -> str:
    # Not torch.device: it knows "npu" only where torch_npu is installed, and a model is explained elsewhere.
    if not _text(name, value).isalpha() or value == "meta":
        raise OptionError(
            f"options[{name!r}]: expected a device type such as cpu, cuda or npu, got {value!r}"
        )
    return str(value)


_PARSERS = {
    "mode": _mode,
    "target": _target,
    "inner": _inner,
    "inner_options": _inner_options,
    "exclude": _exclude,
    "dump": _directory,
    "round_as_eager": _flag,
    "verify": _flag,
    "meta_device": _device,
    "ep_group": _group,
    "ep_max_tokens": _positive,
    "ep_timeout": _seconds,
}
