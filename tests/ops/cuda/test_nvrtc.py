# SPDX-License-Identifier: Apache-2.0
"""NVRTC is found and compiles every kernel family for every architecture: no spills, wide loads in the loops."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops.cuda import nvrtc
from dgl_hybrid.ops.cuda.nvrtc import Nvrtc
from tests.ops.simt.build import SOURCE
from tests.ops.simt.cases import Case, all_cases, default_cases, make_case

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
ATTENTION = ("GAT", "GAT_BACKWARD", "GATV2", "GATV2_BACKWARD")


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    if not nvrtc.find_libraries():
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
    return Nvrtc.load()


def compile_case(compiler: Nvrtc, case: Case, arch: str) -> tuple[bytes, str]:
    if int(arch[3:]) not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.version} does not compile for {arch}")
    options = [*case.options.as_list(), "--ptxas-options=-v"]
    return compiler.compile_with_log(SOURCE.read_text("utf-8"), options, arch)


def assert_nothing_spills(case: Case, log: str) -> None:
    kernels = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill", log)
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert names
    assert {name: (stack, spilled) for name, stack, spilled in kernels} == dict.fromkeys(names, ("0", "0")), case.name
    assert "warning" not in log, log


def widest_cases() -> list[Case]:
    """The specialisations with the most registers of each family, and one of each other kind."""
    heavy = [
        make_case(kernels, ("DROPOUT=1",), profile) for kernels in ATTENTION for profile in ("full_warp", "wide_words")
    ]
    families: dict[str, Case] = {}
    for case in default_cases():
        families.setdefault(case.options.kernels, case)
    return [*heavy, *(case for name, case in families.items() if name not in ATTENTION)]


@pytest.mark.parametrize("case", widest_cases(), ids=lambda case: case.name)
def test_no_spills_on_sm_90(compiler: Nvrtc, case: Case) -> None:
    cubin, log = compile_case(compiler, case, "sm_90")
    assert cubin[:4] == b"\x7fELF"
    assert_nothing_spills(case, log)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90"])
def test_no_spills_on_other_architectures(compiler: Nvrtc, arch: str) -> None:
    case = make_case("GAT_BACKWARD", ("DROPOUT=1",), "full_warp")
    assert_nothing_spills(case, compile_case(compiler, case, arch)[1])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("family", sorted({case.options.kernels for case in default_cases()}))
def test_no_spills_anywhere(compiler: Nvrtc, family: str, arch: str) -> None:
    cases = [case for case in all_cases() if case.options.kernels == family]
    # The operators and targets of SDDMM differ in one instruction: every fifth of them.
    for case in cases[:: 5 if family.startswith("SDDMM") else 1]:
        assert_nothing_spills(case, compile_case(compiler, case, arch)[1])


def loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each loop: from the target of a backward branch to the branch."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)
    addresses = [int(address, 16) for address, _ in lines]
    for position, (_, instruction) in enumerate(lines):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < addresses[position]:
            yield [text for _, text in lines[addresses.index(int(target[1], 16)) : position + 1]]


@pytest.mark.parametrize("dtype", ["F32", pytest.param("BF16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernels", "variant", "kernel", "in_flight"),
    [
        ("SPMM", ("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE"), "spmm_fwd_kernel", 4),
        pytest.param(
            *("SPMM", ("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_HEAD"), "spmm_fwd_kernel", 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("SPMM", ("REDUCE=REDUCE_MAX", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE"), "spmm_fwd_kernel", 4),
            marks=pytest.mark.slow,
        ),
        ("SDDMM_DOT", ("LHS=TARGET_U", "RHS=TARGET_V"), "sddmm_dot_fwd_kernel", 5),
        ("GAT", ("DROPOUT=0",), "gat_fwd_kernel", 4),
        ("GAT_BACKWARD", ("DROPOUT=0",), "gat_bwd_kernel", 8),  # four rows and four times the destination's terms
        pytest.param(*("GATV2", ("DROPOUT=0",), "gatv2_fwd_kernel", 4), marks=pytest.mark.slow),
        pytest.param(*("GATV2_BACKWARD", ("DROPOUT=0",), "gatv2_src_bwd_kernel", 6), marks=pytest.mark.slow),
        ("GATV2_BACKWARD", ("DROPOUT=0",), "gatv2_dst_bwd_kernel", 4),
    ],
)
def test_gather_loops_load_128_bits(
    compiler: Nvrtc, kernels: str, variant: tuple[str, ...], kernel: str, in_flight: int, dtype: str, tmp_path: Path
) -> None:
    tool = find_tool("cuobjdump")
    case = make_case(kernels, variant, "full_warp")
    vec = 4 if dtype == "F32" else 8
    options = [option for option in case.options.as_list() if not option.startswith(("-DDTYPE", "-DVEC", "-DPACKS"))]
    options += [f"-DDTYPE=DTYPE_{dtype}", f"-DVEC={vec}", "-DPACKS=1"]
    file = tmp_path / "kernels.cubin"
    file.write_bytes(compiler.compile(SOURCE.read_text("utf-8"), options, "sm_90"))
    done = subprocess.run([tool, "-sass", "-fun", kernel, str(file)], capture_output=True, text=True, check=True)
    wide = [sum("LDG.E.128" in instruction for instruction in loop) for loop in loops(done.stdout)]
    assert max(wide, default=0) >= in_flight, f"128-bit loads in the loops of {kernel}: {wide}"


def find_tool(name: str) -> str:
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob(f"**/bin/{name}"):
            return str(path)
    pytest.skip(f"{name} is not installed (pip install nvidia-cuda-{name})")


# ---- The library


def test_compile_errors_hold_the_compilers_words(compiler: Nvrtc) -> None:
    with pytest.raises(
        KernelError, match=r"(?s)NVRTC \d+\.\d+ .*-DX=1.*COMPILATION.*identifier \"nonsense\" is undefined"
    ):
        compiler.compile("__global__ void kernel() { nonsense(); }", ["-DX=1"], "sm_90")
    with pytest.raises(KernelError, match="INDEX_BITS and GROUP must be given"):
        compiler.compile(SOURCE.read_text("utf-8"), [], "sm_90")


def test_version_and_architectures(compiler: Nvrtc) -> None:
    assert re.fullmatch(r"\d+\.\d+", compiler.version)
    archs = compiler.supported_archs()
    assert 90 in archs
    assert list(archs) == sorted(archs)


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "_library_folders", lambda: iter([tmp_path]))
    with pytest.raises(
        KernelError, match=r"NVRTC, which was not found \(got no libnvrtc.so in .*pip install nvidia-cuda-nvrtc"
    ):
        Nvrtc.load()
    (tmp_path / "libnvrtc.so.12").write_bytes(b"not a library")
    with pytest.raises(KernelError, match=r"was not found \(got .*libnvrtc.so.12: "):
        Nvrtc.load()


def test_pytorchs_major_version_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layouts = {
        "12": tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12",
        "13": tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13",
        "11": tmp_path / "torch" / "lib" / "libnvrtc-672ee683.so.11.2",
    }
    for path in layouts.values():
        path.parent.mkdir(parents=True)
        path.touch()
        (path.parent / f"libnvrtc-builtins.so.{path.suffix[1:]}").touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(nvrtc.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_SYSTEM_FOLDERS", ())
    for cuda, expected in (("12.8", ["12", "13", "11"]), ("11.8", ["11", "13", "12"]), (None, ["13", "12", "11"])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert nvrtc.find_libraries() == [layouts[major] for major in expected]
