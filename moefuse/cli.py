"""The `moefuse` command: what would be fused in a model and why not, as a table, JSON or files.

In: a model factory named on the command line. Out: the report on stdout, one line per error on stderr, and an
exit code: 0 done, 1 the model or moefuse failed, 2 the command line was wrong, 3 a layer wasn't fused and
4 no MoE layer was found (both with --fail-on-unfused only), 5 two reports differ (with --fail-on-change only).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch

from moefuse._version import __version__
from moefuse.models import TargetError, load
from moefuse.options import MODES, OptionError, Options
from moefuse.report.model import Report
from moefuse.terminal import one_line

try:
    import typer

    from moefuse.bench.command import bench
    from moefuse.exits import CHANGED, FAILED, NOTHING, UNFUSED, USAGE, die
    from moefuse.simulate.cli import simulate
    from moefuse.zoo.cli import zoo
except ImportError as error:
    raise ImportError("the moefuse command needs typer and rich: pip install 'moefuse[cli]'") from error

app = typer.Typer(
    name="moefuse",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=__doc__,
)

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:factory, path/file.py:factory, hf:MODEL_TYPE, hf:path/config.json or "
        "export:path/file.pt2. factory() returns (model, args) or (model, args, kwargs) or (model, kwargs), args a "
        "tuple and kwargs a dict. hf:qwen3_moe is a small transformers model with random weights; with a "
        "checkpoint's config.json it has the real sizes and no weights.",
    ),
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", min=1, help="hf: decoder layers [2, of a config.json all]")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="hf: key=value of the configuration")]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="hf: float32, bfloat16 or float16 [float32]")
]
TokensOption = Annotated[int | None, typer.Option("--tokens", min=1, help="hf: tokens in the prompt [16]")]
ExpertsOption = Annotated[
    str | None, typer.Option("--experts-implementation", help="hf: grouped_mm, batched_mm, eager, ...")
]
MetaOption = Annotated[
    bool, typer.Option("--meta", help="hf: no memory for weights, for --set with real sizes")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="a model without weights is judged as on this device [cpu]")
]
ModeOption = Annotated[str | None, typer.Option("--mode", help="auto, on or off")]
KernelOption = Annotated[
    str | None, typer.Option("--target", help="kernels to use: auto, cpu, reference, ...")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="module path not to fuse, * allowed")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
FailOption = Annotated[
    bool, typer.Option("--fail-on-unfused", help="exit 3 when a layer isn't fused, 4 when there is none")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="also write the report as one HTML page")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the versions")] = False) -> None:
    if version:
        typer.echo(f"moefuse {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.command()
def explain(
    target: TargetArgument,
    layers: LayersOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = None,
    tokens: TokensOption = None,
    experts_implementation: ExpertsOption = None,
    meta: MetaOption = False,
    device: DeviceOption = None,
    mode: ModeOption = None,
    kernel: KernelOption = None,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    fail_on_unfused: FailOption = False,
    debug: DebugOption = False,
) -> None:
    """Show every MoE layer of a model: fused or not, and the first thing that stood in the way.

    A model in eval mode is explained without gradients, one in training mode with them.
    """
    model = _hf_options(layers, set_, dtype, tokens, experts_implementation, meta)
    report = _report(target, model, _backend_options(mode, kernel, exclude, device), debug)
    _print_report(report, as_json)
    _write_html(report, html)
    _exit(report, fail_on_unfused)


@app.command()
def dump(
    target: TargetArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where the files go; made if missing")],
    layers: LayersOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = None,
    tokens: TokensOption = None,
    experts_implementation: ExpertsOption = None,
    meta: MetaOption = False,
    device: DeviceOption = None,
    mode: ModeOption = None,
    kernel: KernelOption = None,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    fail_on_unfused: FailOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the graphs before and after fusion and the report into DIR."""
    if directory.exists() and not directory.is_dir():
        die(f"DIR must be a directory, {directory} is a file", USAGE)
    model = _hf_options(layers, set_, dtype, tokens, experts_implementation, meta)
    options = _backend_options(mode, kernel, exclude, device) | {"dump": str(directory)}
    report = _report(target, model, options, debug)
    _print_report(report, as_json)
    typer.echo(f"written to {directory}", err=True)
    _write_html(report, html)
    _exit(report, fail_on_unfused)


@app.command()
def doctor(
    as_json: JsonOption = False,
    ascend: Annotated[bool, typer.Option("--ascend", help="print what aclnnMegaMoe takes instead")] = False,
) -> None:
    """Show what this machine offers and what each missing thing would enable."""
    from moefuse.doctor import checkup

    if ascend:
        if as_json:
            die("--ascend prints a table, it has no JSON form", USAGE)
        from moefuse.policy.npu_limits import table

        typer.echo(table())
        return

    findings = checkup()
    if as_json:
        entries = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"schema": "moefuse.doctor/1", "findings": entries}, indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        typer.echo(f"{'ok     ' if finding.ok else 'missing'}  {finding.name.ljust(width)}  {finding.found}")
        if not finding.ok:
            typer.echo(f"{' ' * 9}{' ' * width}  would enable: {finding.enables}")


for command in (zoo, bench, simulate):
    app.command()(command)


@app.command()
def diff(
    before: Annotated[
        Path, typer.Argument(metavar="A", help="JSON of explain or of a dump, or a dump's folder")
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="the same, later")],
    as_json: JsonOption = False,
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="exit 5 when anything changed")
    ] = False,
) -> None:
    """Show what changed from A to B: layers, verdicts, reasons and specifications; or operators of two graphs."""
    from moefuse.report import compare

    try:
        found = compare.compare(compare.read(before), compare.read(after))
    except (OSError, ValueError) as error:
        die(one_line(error), USAGE)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if fail_on_change and not found.same:
        raise typer.Exit(CHANGED)


@app.command()
def schema(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="report, graph, dump, diff, doctor, bench, simulation or costs"),
    ],
) -> None:
    """Print the JSON schema of what moefuse writes."""
    from moefuse import schemas

    try:
        typer.echo(json.dumps(schemas.schema(name), indent=1))
    except ValueError as error:
        die(one_line(error), USAGE)


def main() -> None:
    """Entry point of the console script."""
    app()


def _hf_options(
    layers: int | None,
    settings: Sequence[str] | None,
    dtype: str | None,
    tokens: int | None,
    experts_implementation: str | None,
    meta: bool,
) -> dict[str, Any]:
    """Arguments of `hf.build`, only those that were given."""
    options: dict[str, Any] = {
        "layers": layers,
        "tokens": tokens,
        "experts_implementation": experts_implementation,
        "meta": meta or None,
    }
    if settings:
        options["overrides"] = dict(map(_setting, settings))
    if dtype is not None:
        value = getattr(torch, dtype, None)
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            die(f"--dtype must be a floating point type of torch such as bfloat16, got {dtype!r}", USAGE)
        options["dtype"] = value
    return {name: value for name, value in options.items() if value is not None}


def _setting(text: str) -> tuple[str, Any]:
    """`key=value`; the value is JSON where it reads as JSON, otherwise a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        die(f"--set must be key=value, got {text!r}", USAGE)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, {"True": True, "False": False, "None": None}.get(value, value)


def _backend_options(
    mode: str | None, target: str | None, exclude: Sequence[str] | None, device: str | None
) -> dict[str, Any]:
    """Options of the backend, only those that were given."""
    from moefuse import targets

    kernels = ["auto", *targets.names()]
    for option, value, allowed in (("--mode", mode, MODES), ("--target", target, kernels)):
        if value is not None and value not in allowed:
            die(f"{option} must be one of {', '.join(allowed)}, got {value!r}", USAGE)
    every = {"mode": mode, "target": target, "exclude": list(exclude or ()) or None, "meta_device": device}
    given = {name: value for name, value in every.items() if value is not None}
    try:
        Options.parse(given)
    except OptionError as error:
        die(one_line(error), USAGE)
    return given


def _report(target: str, model: Mapping[str, Any], options: dict[str, Any], debug: bool) -> Report:
    """Compile the target's model and hand back its report; errors end the command."""
    import moefuse

    try:
        with _busy(f"loading {target}"):
            loaded = load(target, model)
    except TargetError as error:
        if debug:
            raise
        die(str(error), USAGE)
    try:
        # A model in eval mode is explained as it will be served; gradients would make it another layer.
        gradients = bool(getattr(loaded.model, "training", False))
        with _busy("capturing and explaining"), torch.set_grad_enabled(gradients):
            return moefuse.explain(loaded.model, *loaded.args, moefuse_options=options, **loaded.kwargs)
    except Exception as error:
        if debug:
            raise
        die(f"{type(error).__name__}: {one_line(error)} (--debug shows the traceback)", FAILED)


@contextmanager
def _busy(words: str) -> Iterator[None]:
    """Say what takes so long, where a person is watching."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(words, total=None)
        yield


def _print_report(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(report.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        from moefuse.report.text import render

        Console().print(render(report))
    else:
        typer.echo(str(report))


def _write_html(report: Report, path: Path | None) -> None:
    if path is None:
        return
    try:
        report.to_html(path)
    except (ImportError, OSError) as error:
        die(f"--html {path}: {one_line(error)}", FAILED)
    typer.echo(f"written to {path}", err=True)


def _exit(report: Report, fail_on_unfused: bool) -> None:
    if fail_on_unfused and not report.sites:
        raise typer.Exit(NOTHING)
    if fail_on_unfused and report.fused < len(report.sites):
        raise typer.Exit(UNFUSED)


if __name__ == "__main__":
    main()
