"""Options: what is accepted, and errors that name the option, what was expected and what came."""

from pathlib import Path
from typing import Any

import pytest

from moefuse.options import OptionError, Options


def test_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options("auto", "auto", "auto", (), "")


def test_every_option() -> None:
    given = {"mode": "on", "target": "reference", "inner": "eager", "exclude": ["a.*", "b"], "dump": "out"}
    assert Options.parse(given) == Options("on", "reference", "eager", ("a.*", "b"), "out")


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_modes(mode: str) -> None:
    assert Options.parse({"mode": mode}).mode == mode


def test_a_timeout_in_seconds() -> None:
    assert [Options.parse(given).ep_timeout for given in ({}, {"ep_timeout": 7})] == [300.0, 7.0]


@pytest.mark.parametrize(("name", "near"), [("excludes", "exclude"), ("targets", "target"), ("Mode", "mode")])
def test_an_unknown_option_is_named_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option '{name}'; did you mean '{near}'") as caught:
        Options.parse({name: 1})
    for known in ("mode", "target", "inner", "exclude", "dump"):
        assert known in str(caught.value)


def test_an_unknown_option_without_a_near_one() -> None:
    with pytest.raises(OptionError, match=r"unknown option 'xyzzy' \(known: mode"):
        Options.parse({"xyzzy": 1})


WRONG: list[tuple[str, Any, str]] = [
    ("mode", "fast", "options['mode']: expected one of auto, on, off, got 'fast'"),
    ("mode", True, "options['mode']: expected one of auto, on, off, got True"),
    ("target", "tpu", "options['target']: expected one of auto, cpu, npu, reference, got 'tpu'"),
    ("target", None, "options['target']: expected one of auto, cpu, npu, reference, got None"),
    (
        "inner",
        "tvm",
        "options['inner']: expected one of auto, inductor, eager, npugraph_ex, torchair, got 'tvm'",
    ),
    (
        "exclude",
        "model.layers.1",
        "options['exclude']: expected a list of module path patterns, got 'model.layers.1'",
    ),
    ("exclude", [1], "options['exclude']: expected a list of module path patterns, got [1]"),
    ("exclude", None, "options['exclude']: expected a list of module path patterns, got None"),
    ("exclude", 3, "options['exclude']: expected a list of module path patterns, got 3"),
    (
        "inner_options",
        [1],
        "options['inner_options']: expected a dict with the inner compiler's options by name, got [1]",
    ),
    ("ep_timeout", 0, "options['ep_timeout']: expected a positive number of seconds, got 0"),
    ("ep_timeout", float("inf"), "options['ep_timeout']: expected a positive number of seconds, got inf"),
    ("ep_timeout", True, "options['ep_timeout']: expected a positive number of seconds, got True"),
    ("ep_timeout", "9", "options['ep_timeout']: expected a positive number of seconds, got '9'"),
    ("dump", 1, "options['dump']: expected a directory's path, got int 1"),
    ("dump", None, "options['dump']: expected a directory's path, got NoneType None"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{n}={v!r}" for n, v, _ in WRONG])
def test_impossible_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({name: value})
    assert str(caught.value) == message


def test_a_mode_of_inductor_is_told_where_it_goes() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"mode": "max-autotune"})
    assert "expected one of auto, on, off, got 'max-autotune'" in str(caught.value)
    assert "torch.compile(..., mode='max-autotune')" in str(caught.value)


@pytest.mark.parametrize("given", ["on", ["mode"], 3])
def test_options_are_a_dict(given: Any) -> None:
    with pytest.raises(OptionError, match="options: expected a dict of options by name, got"):
        Options.parse(given)


def test_a_directory_is_a_string_or_a_path() -> None:
    assert [Options.parse({"dump": given}).dump for given in ("a/b", Path("a/b"))] == ["a/b"] * 2


@pytest.mark.parametrize("name", ["inner", "inner_options", "round_as_eager", "verify"])
def test_a_pass_alone_has_no_options_of_the_compiler(name: str) -> None:
    given = {name: getattr(Options(), name)}
    Options.parse(given)
    with pytest.raises(OptionError, match=f"options.'{name}'.: who compiles and runs the graph"):
        Options.parse_for_pass(given, "who")


def test_an_option_error_is_a_value_error() -> None:
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize(
    ("pattern", "layer", "matches"),
    [
        ("model.layers.1.*", "model.layers.1.mlp", True),
        ("model.layers.1.*", "model.layers.11.mlp", False),
        ("model.layers.1", "model.layers.1.mlp", False),
        ("*.mlp", "model.layers.1.mlp", True),
        ("*.MLP", "model.layers.1.mlp", False),
        ("model.layers.[0-3].*", "model.layers.2.mlp", True),
        ("*", "", True),
    ],
)
def test_exclude_patterns(pattern: str, layer: str, matches: bool) -> None:
    options = Options.parse({"exclude": ["nothing", pattern]})
    assert options.excluded(layer) == (f"excluded by the option exclude={pattern!r}" if matches else "")
