"""The emulated device: tensors, streams, captured graphs; and npugraph_ex on it, which captures what moefuse made."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import targets
from moefuse.passes import as_torchair_pass
from moefuse.targets.npu import PreparationError, close_npu_contexts, copied_bytes, formats, prepare
from tests.npu.emulator import kernels
from tests.npu.expert_parallel import H, Layers, QuantisedLayers, vendor
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def test_operators_run_on_its_memory() -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    on = x.npu()
    assert on.device.type == "npu"
    values, ids = (on @ w.npu()).softmax(-1).topk(2)
    want = (x @ w).softmax(-1).topk(2)
    torch.testing.assert_close(values.cpu(), want.values)
    assert ids.cpu().equal(want.indices)
    on.add_(1)
    torch.testing.assert_close(on[:, 2:4].bfloat16().cpu(), (x + 1)[:, 2:4].bfloat16())


def test_a_captured_graph_runs_when_it_is_replayed() -> None:
    x, w = torch.randn(2, 3).npu(), torch.randn(3, 4).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x @ w) * 2
    for _ in range(3):
        new = torch.randn(2, 3)
        x.copy_(new)
        graph.replay()
        torch.testing.assert_close(y.cpu(), new @ w.cpu() * 2)


def test_a_capture_follows_events() -> None:
    x, graph, side = torch.ones(3).npu(), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        y = x + 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y * 3
        torch.npu.current_stream().wait_stream(side)
    x.copy_(torch.full((3,), 4.0))
    graph.replay()
    assert z.cpu().tolist() == [15.0, 15.0, 15.0]


def test_an_operator_without_a_kernel_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Single operator not found"):
        torch.ones(3).npu().erfinv()


def test_what_a_kernel_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Tensor) -> Tensor:
        raise OverflowError("no such memory")

    x = torch.ones(3).npu()
    monkeypatch.setattr(kernels, "host_view", broken)
    with pytest.raises(OverflowError, match="no such memory"):
        x.abs()


def npugraph_ex(module: Any) -> tuple[Any, list[list[str]]]:
    graphs: list[list[str]] = []
    hooks = {
        "post_grad_custom_pre_pass": as_torchair_pass(),
        "post_grad_custom_post_pass": lambda gm, *_: graphs.append(
            [str(node.target) for node in gm.graph.nodes]
        ),
    }
    return torch.compile(module, backend="npugraph_ex", options=hooks, fullgraph=True), graphs


@pytest.mark.parametrize(("uniform", "listed"), [(True, False), (False, True)])
def test_captured_once_and_replayed_a_hundred_times(uniform: bool, listed: bool) -> None:
    """Two layers of rank 0 of 2, over the fake library, which the emulated stream keeps with everything around it."""
    with vendor(on_streams=True) as library:
        model = Layers(2, uniform, listed, "npu", named=listed).eval()
        run, graphs = npugraph_ex(model)
        for turn in range(100):
            generator = torch.Generator().manual_seed(turn)
            x = torch.randn(6, H, generator=generator).bfloat16().npu()
            checked = turn in (0, 1, 60, 99)
            library.set("computes", checked)  # its plain loops take their time
            got = run(x)
            if checked:
                assert got.cpu().isfinite().all()
                assert got.cpu().equal(model(x).cpu())
        library.set("computes", True)
        assert [graph.count("moefuse.mega_moe.ep") for graph in graphs] == [2]
        close_npu_contexts()


@pytest.mark.parametrize("uniform", [True, False])
def test_other_token_counts_are_captured_without_another_compile(uniform: bool) -> None:
    with vendor(on_streams=True):
        model = Layers(1, uniform, device="npu").eval()
        run, graphs = npugraph_ex(model)
        for tokens in (6, 3, 6, 16, 3):
            x = torch.randn(tokens, H).bfloat16().npu()
            torch._dynamo.mark_dynamic(x, 0)
            assert run(x).cpu().equal(model(x).cpu())
        assert len(graphs) == 1
        close_npu_contexts()


@pytest.fixture
def tiles() -> Iterator[None]:
    """torch_npu makes tensors in tiles only where it's told to."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def test_quantised_experts_are_captured(tiles: None) -> None:
    """Integers in tiles, as an engine casts them; their scales are encoded in the graph."""
    with vendor(on_streams=True):
        targets.get("npu").tell(weights_cast=True)  # type: ignore[attr-defined]
        model = QuantisedLayers(2, "npu").eval()
        run, graphs = npugraph_ex(model)
        for turn in range(3):
            x = torch.randn(6, H, generator=torch.Generator().manual_seed(turn)).bfloat16()
            got = run(x.npu()).cpu()
            assert got.equal(model(x.npu()).cpu())
            want = model.whole(x).double()
            # bfloat16; an activation rounded otherwise moves some integers of a row by one
            assert float((got.double() - want).norm() / want.norm()) < 1e-2
        assert [graph.count("moefuse.mega_moe.quant_ep") for graph in graphs] == [2]
        close_npu_contexts()


def test_weights_are_cast_by_torch_npu() -> None:
    plain = torch.randint(-127, 128, (2, 32, 64), dtype=torch.int8)
    weight, before = plain.npu(), copied_bytes()
    with pytest.raises(PreparationError, match=r"cast to FRACTAL_NZ; .*allow_internal_format = True"):
        prepare([weight], False, "FRACTAL_NZ")
    torch.npu.config.allow_internal_format = True
    try:
        made = prepare([weight], False, "FRACTAL_NZ")
        assert [formats.memory_format(one) for one in (weight, *made)] == ["ND", "FRACTAL_NZ", "FRACTAL_NZ"]
        assert kernels.host_view(made[1]).equal(kernels.tiled(plain)[1])
        assert copied_bytes() - before == weight.nbytes
        addresses = [one.data_ptr() for one in made]
        weight.add_(1)
        again = prepare([weight], False, "FRACTAL_NZ")
        assert [one.data_ptr() for one in again] == addresses  # a captured graph reads there
        assert kernels.host_view(again[1]).equal(kernels.tiled(plain + 1)[1])
        assert weight.cpu().equal(plain + 1)
    finally:
        torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("name", ["sglang_bf16", "cumulative"])
def test_by_itself_moefuse_takes_npugraph_ex_and_refuses_one_rank(name: str) -> None:
    inputs = tuple(tensor.npu() for tensor in operands(6))
    want = SEQUENCES[name](*operands(6))
    run = torch.compile(SEQUENCES[name], backend="moefuse", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(run(*inputs).cpu(), want, rtol=0, atol=0)  # the model's own operators
    (site,) = moefuse.reports()[-1].sites
    assert (site.fused, site.target, site.check) == (False, "npu", "install")
    assert "no library has aclnnMegaMoe" in site.reason
