import linecache

import pytest
import torch
from torch import fx, nn

from moefuse.graph.source import code_of, common_layer, layer_of, module_path, source_of


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.w  # the expert line


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Expert(), Expert()])
        self.parts = nn.ModuleDict({"a-b": Expert()})
        self.linear = nn.Sequential(nn.Linear(4, 4))
        setattr(self, "odd name", Expert())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return getattr(self, "odd name")(self.linear(self.parts["a-b"](x))) + 1


@pytest.fixture(scope="module")
def nodes():
    captured = []

    def backend(gm, _):
        captured.extend(gm.graph.nodes)
        return gm.forward

    torch.compile(Model(), backend=backend, fullgraph=True)(torch.ones(2, 4))
    return [node for node in captured if node.op == "call_function"]


@pytest.mark.parametrize(
    ("spelling", "path"),
    [
        ("L['self'].model.layers.0.mlp.experts", "model.layers.0.mlp.experts"),
        ("G['net'].model.layers.0", "model.layers.0"),
        ("L['self']._modules['layers']['0'].mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']._modules['mlp']", "layers.0.mlp"),
        ("getattr(L['self'].m, 'odd name')", "m.odd name"),
        ("getattr(getattr(L['self'].layers, '0').mlp, 'a-b').act", "layers.0.mlp.a-b.act"),
        ("L['fn'].__closure__[0].cell_contents.layers.1", "layers.1"),
        ("L['blocks'][3].mlp", "3.mlp"),
        ("L['step'].__self__.layers.1", "layers.1"),
        ("L['fn'].__closure__[0].cell_contents.__self__.layers.1", "layers.1"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("L['self']", ""),
        ("", ""),
    ],
)
def test_every_spelling_of_a_module_is_one_dotted_path(spelling, path):
    assert module_path(spelling) == path


def test_layers_of_a_compiled_module(nodes):
    layers = list(dict.fromkeys(layer_of(node) for node in nodes))
    assert layers == ["layers.0", "layers.1", "parts.a-b", "linear.0", "odd name", ""]


def test_layers_of_an_exported_module():
    program = torch.export.export(Model(), (torch.ones(2, 4),))
    layers = [layer_of(node) for node in program.graph.nodes if node.op == "call_function"]
    assert list(dict.fromkeys(layers)) == ["layers.0", "layers.1", "parts.a-b", "linear.0", "odd name", ""]


def test_common_layer_is_the_deepest_module_that_holds_all(nodes):
    def inside(prefix):
        return [node for node in nodes if layer_of(node).startswith(prefix)]

    assert common_layer(inside("layers.0")) == "layers.0"
    assert common_layer(inside("layers")) == "layers"
    assert common_layer(nodes) == ""
    assert common_layer([]) == ""


def test_common_layer_counts_the_root_but_not_nodes_without_an_origin(nodes):
    (root,) = (node for node in nodes if layer_of(node) == "")
    inner = next(node for node in nodes if layer_of(node) == "layers.0")
    graph = fx.Graph()
    made_by_a_pass = graph.call_function(torch.relu, (graph.placeholder("x"),))
    assert common_layer([inner, made_by_a_pass]) == "layers.0"
    assert common_layer([inner, root]) == ""


def test_common_layer_compares_whole_names():
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.relu, (x,)) for _ in range(2)]
    for node, name in zip(nodes, ("layers.1", "layers.10"), strict=True):
        node.meta["nn_module_stack"] = {"k": (f"L['self'].{name}", Expert)}
    assert common_layer(nodes) == "layers"


def test_source_is_the_innermost_line_of_the_user(nodes):
    node = next(node for node in nodes if layer_of(node) == "layers.1")
    file, _, line = source_of(node).rpartition(":")
    assert file == __file__
    assert "the expert line" in linecache.getline(file, int(line))
    assert code_of(node).startswith("return x @ self.w")


def test_frames_inside_torch_are_skipped():
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["stack_trace"] = (
        '  File "model.py", line 7, in forward\n    return act(x)\n           ^^^^^^\n'
        f'  File "{torch.nn.functional.__file__}", line 9, in silu\n    return torch._C._nn.silu(x)\n'
    )
    assert source_of(node) == "model.py:7"
    assert code_of(node) == "return act(x)"


def test_a_node_without_metadata_has_no_origin():
    node = fx.Graph().placeholder("x")
    assert (layer_of(node), source_of(node), code_of(node)) == ("", "", "")
