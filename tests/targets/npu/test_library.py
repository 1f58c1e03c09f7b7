"""Finding the vendor's library and its revision, on compiled fakes."""

from pathlib import Path

import pytest

from moefuse import doctor
from moefuse.targets.npu import REVISIONS, InstallError, find, identify
from moefuse.targets.npu.library import candidates
from tests.targets.npu.vendor import (
    FOREIGN,
    PROTOTYPES,
    R0,
    R1,
    R4,
    R6,
    Package,
    package,
    parameters,
    plain_name,
)

KNOWN = [name for name in PROTOTYPES if name != "foreign"]


def custom(*packages: Package) -> dict[str, str]:
    return {"ASCEND_CUSTOM_OPP_PATH": ":".join(str(p.folder) for p in packages)}


@pytest.mark.parametrize("revision", KNOWN)
def test_the_derived_argument_lists_are_the_published_ones(revision: str) -> None:
    published = [(kind.replace(" ", ""), plain_name(name)) for kind, name in parameters(PROTOTYPES[revision])]
    assert [(slot.kind.value, slot.name) for slot in REVISIONS[revision]] == published


# --- finding ----------------------------------------------------------------------------------------------


def test_the_custom_path_comes_before_the_listed_vendors(tmp_path: Path) -> None:
    first, second, listed = (package(tmp_path / name, R1) for name in ("a", "b", "opp/vendors/good"))
    package(tmp_path / "opp/vendors/unlisted", R1)
    vendors = tmp_path / "opp" / "vendors"
    (vendors / "config.ini").write_text("# order\nload_priority=absent, good\n")
    environment = custom(first, Package(tmp_path / "nothing"), second) | {
        "ASCEND_OPP_PATH": str(tmp_path / "opp")
    }
    assert list(candidates(environment)) == [first.folder, second.folder, listed.folder]
    assert find(environment).path == first.library
    assert find({"ASCEND_OPP_PATH": str(tmp_path / "opp")}).package == listed.folder
    (vendors / "config.ini").write_text("nothing here\n")
    assert list(candidates({"ASCEND_OPP_PATH": str(tmp_path / "opp")})) == []


def test_no_package_at_all() -> None:
    with pytest.raises(
        InstallError, match=r"no library has aclnnMegaMoe \(asked: nothing\); install the vendor's"
    ):
        find({})


def test_a_missing_symbol(tmp_path: Path) -> None:
    for name, left_out in (("aclnnMegaMoe", "execute"), ("aclnnMegaMoeGetWorkspaceSize", "workspace")):
        made = package(tmp_path / left_out, R1, **{left_out: False})
        with pytest.raises(InstallError, match=f"nobody has {name}: reinstall"):
            find(custom(made))


def test_symbols_split_over_two_libraries(tmp_path: Path) -> None:
    half = package(tmp_path / "half", R1, execute=False)
    whole = package(tmp_path / "whole", R6)
    with pytest.raises(
        InstallError,
        match=r"is found in .*half/.* and aclnnMegaMoe in .*whole/",
    ):
        find(custom(half, whole))
    assert find(custom(whole, half)).path == whole.library


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    broken = Package(tmp_path / "broken")
    broken.library.parent.mkdir(parents=True)
    broken.library.write_bytes(b"not a library")
    with pytest.raises(InstallError, match="doesn't load"):
        find(custom(broken))


# --- identifying ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", KNOWN)
def test_a_header_tells_the_revision(tmp_path: Path, revision: str) -> None:
    made = package(tmp_path, PROTOTYPES[revision]).header(PROTOTYPES[revision])
    found = identify(find(custom(made)), environment={})
    assert found.revision == revision
    assert found.evidence[0].endswith("aclnn_mega_moe.h")


@pytest.mark.parametrize("revision", KNOWN)
def test_the_operator_information_tells_the_revision(tmp_path: Path, revision: str) -> None:
    made = package(tmp_path, PROTOTYPES[revision]).info(PROTOTYPES[revision])
    assert identify(find(custom(made)), environment={}).revision == revision


SCHEMA_R6 = """cann_ops_transformer::npu_mega_moe(Tensor context, Tensor x, Tensor topk_ids, Tensor topk_weights,
 Tensor[] weight1, Tensor[] weight2, int moe_expert_num, int ep_world_size, int ccl_buffer_size, *,
 Tensor[]? weight_scales1=None, Tensor[]? weight_scales2=None, Tensor[]? bias1=None, Tensor[]? bias2=None,
 Tensor? x_active_mask=None, Tensor[]? shared_weight1=None, Tensor[]? shared_weight2=None,
 Tensor[]? shared_weight_scales1=None, Tensor[]? shared_weight_scales2=None, Tensor[]? shared_bias1=None,
 Tensor[]? shared_bias2=None, int max_recv_token_num=0, int dispatch_quant_mode=0, int combine_quant_mode=0,
 str comm_alg="", int num_max_tokens_per_rank=0, str activation="swiglu", float? activation_clamp=None,
 Dict(str, float)? activation_params=None, int? dispatch_quant_out_dtype=None, int? weight1_type=None,
 int? weight2_type=None, int? topo_type=None, int? rank_num_per_server=None, int topk_weights_type=0)
 -> (Tensor, Tensor)"""
SCHEMA_R1 = """npu_mega_moe(Tensor context, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1,
 Tensor[] weight2, int moe_expert_num, int ep_world_size, int ccl_buffer_size, *, Tensor[]? weight_scales1=None,
 Tensor[]? weight_scales2=None, Tensor[]? bias1=None, Tensor[]? bias2=None, Tensor? x_active_mask=None,
 int max_recv_token_num=0, int dispatch_quant_mode=0, int combine_quant_mode=0, str comm_alg="",
 int num_max_tokens_per_rank=0, str activation="swiglu", float? activation_clamp=None,
 int? dispatch_quant_out_dtype=None, int? weight1_type=None, int? weight2_type=None) -> (Tensor, Tensor)"""


@pytest.mark.parametrize(("revision", "schema"), [("R1", SCHEMA_R1), ("R6", SCHEMA_R6)])
def test_the_torch_schema_tells_the_revision(tmp_path: Path, revision: str, schema: str) -> None:
    library = find(custom(package(tmp_path, PROTOTYPES[revision])))
    assert identify(library, schema=schema, environment={}).revision == revision
    newer = schema.replace("int dispatch_quant_mode=0", "int dispatch_quant_mode=0, int combine_comm_mode=0")
    with pytest.raises(InstallError, match=r"an aclnnMegaMoe that moefuse doesn't know .*combinecommmode"):
        identify(library, schema=newer, environment={})


def test_an_operator_of_the_same_name_from_somebody_else(tmp_path: Path) -> None:
    made = package(tmp_path, FOREIGN).header(FOREIGN)
    with pytest.raises(InstallError, match=r"doesn't know \(7 arguments: x, gate, weights, groups, yOut"):
        identify(find(custom(made)), environment={})


def test_a_later_revision_is_refused_by_each_source(tmp_path: Path) -> None:
    later = R6.replace("int64_t topkWeightsType,", "int64_t topkWeightsType, int64_t combineCommMode,")
    assert later != R6
    header = package(tmp_path / "a", later).header(later)
    with pytest.raises(InstallError, match="doesn't know"):
        identify(find(custom(header)), environment={})
    info = package(tmp_path / "b", later).info(R6, extra="combine_comm_mode")
    with pytest.raises(InstallError, match="doesn't know"):
        identify(find(custom(info)), environment={})


def test_the_same_names_in_another_order_or_type_are_another_operator(tmp_path: Path) -> None:
    swapped = R1.replace(
        "int64_t moeExpertNum, int64_t epWorldSize", "int64_t epWorldSize, int64_t moeExpertNum"
    )
    retyped = R1.replace("float activationClamp", "double activationClamp")
    for name, prototype in (("swapped", swapped), ("retyped", retyped)):
        assert prototype != R1
        made = package(tmp_path / name, R1).header(prototype)
        with pytest.raises(InstallError, match="doesn't know"):
            identify(find(custom(made)), environment={})


def test_parts_of_two_versions(tmp_path: Path) -> None:
    made = package(tmp_path, R6).header(R6).info(R1)
    with pytest.raises(InstallError, match=r"disagree \(.*R6; .*R1\): reinstall"):
        identify(find(custom(made)), environment={})
    assert identify(find(custom(made.info(R6))), environment={}).revision == "R6"
    with pytest.raises(InstallError, match="disagree"):
        identify(find(custom(made)), schema=SCHEMA_R1, environment={})


def test_a_library_alone_is_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"its argument list isn't known. Install the complete package"):
        identify(find(custom(package(tmp_path, R4))), environment={})


def test_a_package_for_another_toolkit(tmp_path: Path) -> None:
    made = package(tmp_path / "vendor", R0).header(R0).version("9.1.0-beta.3")
    home = tmp_path / "toolkit"
    (home / "compiler").mkdir(parents=True)
    environment = {"ASCEND_HOME_PATH": str(home)}
    library = find(custom(made))
    assert identify(library, environment=environment).revision == "R0"  # the toolkit doesn't say
    (home / "compiler" / "version.info").write_text("Version=9.2.0\nversion_dir=9.2.0\n")
    with pytest.raises(InstallError, match=r"built for CANN 9.1.0-beta.3, the toolkit in .* is 9.2.0"):
        identify(library, environment=environment)
    (home / "compiler" / "version.info").write_text("Version=9.1.0-beta.3\n")
    assert identify(library, environment=environment).revision == "R0"


def test_the_doctor_says_which_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding() -> doctor.Finding:
        return next(finding for finding in doctor.checkup() if finding.name == "aclnnMegaMoe")

    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    assert not finding().ok
    assert "no library has aclnnMegaMoe" in finding().found
    made = package(tmp_path, R6).header(R6)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(made.folder))
    assert finding().ok
    assert finding().found == f"R6, {made.library}"
