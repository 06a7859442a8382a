# SPDX-License-Identifier: Apache-2.0
"""Each fix mends what it says: what fails with DGL as released (all other fixes applied) works with the fix.

Every program runs in a process of its own that has imported nothing of DGL or ours; torch and what else takes seconds
is there already, since all are forked from one process.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgl_hybrid.compat.fixes import load_fixes
from dgl_hybrid.compat.patchfile import apply_patches
from dgl_hybrid.compat.versions import find_dgl
from tests.compat.processes import CHECKOUT

PRELUDE = """
import sys, warnings, tempfile, os, pathlib
import dgl_hybrid
from dgl_hybrid.compat.hook import FINDER
FINDER.skip = set(filter(None, sys.argv[1].split(",")))

class Absent:
    def __init__(self, *names):
        self.names = names
        for name in [n for n in sys.modules if n.split(".")[0] in names]: del sys.modules[name]
    def find_spec(self, name, path=None, target=None):
        if name in self.names: raise ModuleNotFoundError(f"No module named {name!r}", name=name)
"""

# Number of the fix -> a program that ends well with the fix and fails without it.
PROGRAMS = {
    "0001": """
        FINDER.prepare()  # needs packaging itself
        for name in [n for n in sys.modules if n.split(".")[0] in ("packaging", "setuptools")]: del sys.modules[name]
        sys.meta_path.insert(0, Absent("packaging", "setuptools.extern"))
        try:
            import dgl
        except ImportError as error:
            assert "pip install packaging" in str(error), error
        else:
            raise AssertionError("nothing was missing")
    """,
    "0002": """
        import dgl, torch
        graph = dgl.graph(([0, 1], [1, 2]))
        assert not isinstance(graph, dgl.graphbolt.FusedCSCSamplingGraph)
        if dgl.graphbolt._unusable_because is not None:
            for use in (lambda: dgl.graphbolt.ItemSet(3), dgl.graphbolt.FusedCSCSamplingGraph):
                try:
                    use()
                except ImportError as error:
                    assert "dgl.graphbolt." in str(error) and "cannot be used with PyTorch" in str(error), error
                else:
                    raise AssertionError("graphbolt without its library")
            assert not hasattr(dgl.graphbolt, "__wrapped__") and not hasattr(dgl.graphbolt, "expit")
            # Looks through all modules for what does not say where it is from.
            import pickle
            assert pickle.whichmodule(1, "expit") == "__main__"
            from scipy.special import expit
            assert pickle.loads(pickle.dumps(expit)) is expit
    """,
    "0003": """
        sys.meta_path.insert(0, Absent("pandas"))
        import dgl
        try:
            dgl.data.MovieLensDataset("ml-100k", valid_ratio=0.2)
        except ImportError as error:
            assert "pip install pandas" in str(error), error
        else:
            raise AssertionError("pandas was not missing")
    """,
    "0004": """
        import contextlib, io
        os.environ.pop("DGLBACKEND", None)
        folder = pathlib.Path(tempfile.mkdtemp()) / "unborn"
        os.environ["DGLDEFAULTDIR"] = str(folder)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            import dgl
        assert dgl.backend.backend_name == "pytorch"
        assert not folder.exists() and out.getvalue() == "", out.getvalue()
    """,
    "0005": """
        import dgl, dgl.partition, gc
        from dgl.data.citation_graph import _parse_index_file
        from dgl.distributed.rpc import read_ip_config
        file = pathlib.Path(tempfile.mkdtemp(), "lines")
        for text, read in (
            ("", lambda: dgl.partition.get_peak_mem()),
            ("3\\n1\\n", lambda: _parse_index_file(file)),
            ("127.0.0.1 30050\\n", lambda: read_ip_config(str(file), 1)),
        ):
            file.write_text(text)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                assert read()
                gc.collect()
            assert not caught, caught[0].message
    """,
    "0006": """
        import json
        import dgl, numpy
        from dgl.data import PPIDataset
        folder = pathlib.Path(tempfile.mkdtemp())
        nodes = [{"id": i} for i in range(48)]
        links = [{"source": i, "target": i + 1} for i in range(0, 48, 2)]
        graph = {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "links": links}
        PPIDataset.save = lambda self: None
        def write(self):
            path = pathlib.Path(self.save_path)
            path.mkdir(parents=True, exist_ok=True)
            (path / "train_graph.json").write_text(json.dumps(graph))
            for name, array in (("labels", numpy.zeros((48, 2))), ("feats", numpy.zeros((48, 3))),
                                ("graph_id", numpy.repeat(numpy.arange(1, 25), 2))):
                numpy.save(path / f"train_{name}.npy", array)
        PPIDataset.download = write
        data = PPIDataset("train", raw_dir=str(folder))
        assert len(data) == 20 and data[0].num_edges() == 1, (len(data), data[0])
    """,
    "0007": """
        import dgl, torch
        import dgl.nn.pytorch as nn
        warnings.simplefilter("error")
        graph = dgl.add_self_loop(dgl.rand_graph(6, 20))
        features = torch.randn(6, 4)
        # What a CUDA autocast region sets, without a GPU.
        torch.set_autocast_enabled("cuda", True)
        out = dgl.ops.copy_u_sum(graph, features)
        assert torch.is_autocast_enabled("cuda") and out.dtype == torch.float32
        torch.set_autocast_enabled("cuda", False)
        model = nn.GATConv(4, 3, 2)
        expected = model(graph, features)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(graph, features)
            assert torch.is_autocast_enabled("cpu")
            out.float().sum().backward()
        # bfloat16 has 8 bits; sums of up to 20 terms of size 1.
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)
    """,
    "0008": """
        import dgl
        warnings.simplefilter("error")
        dgl.graph(([0, 1], [1, 2])).adj_external()
    """,
    "0009": """
        import dgl
        try:
            dgl.graph(([0, 1], [1, 2])).adj()
        except ImportError as error:
            assert "adj_external()" in str(error), error
    """,
    "0010": """
        import dgl, torch
        import dgl.nn.pytorch as nn
        warnings.simplefilter("error")
        class Conv(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.GraphConv(4, 4)
            def forward(self, graph, x):
                return self.conv(graph, x)
        graph = dgl.add_self_loop(dgl.rand_graph(6, 20)).to("cpu")
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        model = nn.GroupRevRes(Conv().double(), 2)
        inputs = x * 1.0
        model(graph, inputs).square().sum().backward()
        plain = x.detach().clone().requires_grad_()
        ys, carry = [], plain[:, 4:]
        for i in (0, 1):
            carry = plain[:, 4 * i : 4 * i + 4] + model.gnn_modules[i](graph, carry)
            ys.append(carry)
        torch.cat(ys, 1).square().sum().backward()
        torch.testing.assert_close(x.grad, plain.grad)
    """,
    "0011": """
        import dgl, torch
        from dgl.distributed import rpc_client
        from dgl.heterograph_index import create_heterograph_from_shared_memory
        from dgl.ndarray import create_shared_mem_array, exist_shared_mem_array, get_shared_mem_array
        names = lambda: {name for name in os.listdir("/dev/shm") if unique in name}
        unique = f"several_{os.getpid()}_{os.urandom(4).hex()}"  # nobody else's
        namebook = {i: [i, "127.0.0.1", 30050 + i, 1] for i in range(3)}
        plain = dgl.graph(([0, 1], [1, 2])).shared_memory(unique)
        assert rpc_client.get_local_machine_id(namebook) == 0
        assert {name for name in names() if not name.startswith(unique)} == set()
        del plain
        held = []
        for machine in (1, 2):
            os.environ["DGL_HYBRID_MACHINE_ID"] = str(machine)
            os.environ["DGL_HYBRID_SHM_PREFIX"] = f"machine{machine}_"
            assert rpc_client.get_local_machine_id(namebook) == machine
            assert not exist_shared_mem_array("/" + unique + "_rows")
            held.append(dgl.graph(([0] * machine, [1] * machine)).shared_memory(unique, formats=("csc",)))
            held.append(create_shared_mem_array("/" + unique + "_rows", (machine,), torch.int64).fill_(machine))
        assert {name[:9] for name in names()} == {"machine1_", "machine2_"}, names()
        for machine in (1, 2):
            os.environ["DGL_HYBRID_SHM_PREFIX"] = f"machine{machine}_"
            assert exist_shared_mem_array("/" + unique + "_rows")
            rows = get_shared_mem_array("/" + unique + "_rows", (machine,), torch.int64)
            assert rows.tolist() == [machine] * machine
            graph, _, _ = create_heterograph_from_shared_memory(unique)
            assert graph.num_edges(0) == machine
        # Semaphores of the sampler pool, here without servers.
        from dgl.distributed import dist_context
        os.environ["DGL_NUM_SAMPLER"] = "0"
        dist_context.initialize("")
        import multiprocessing
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        assert semaphore._semlock.name.startswith("/machine2_"), semaphore._semlock.name
        # GraphBolt's names, without its library.
        class Bolted:
            copy_to_shared_memory = staticmethod(lambda name: name)
        from dgl.distributed import dist_graph
        dist_graph.gb = type("gb", (), {"load_from_shared_memory": staticmethod(lambda name: name)})
        assert dist_graph._copy_graph_to_shared_mem(Bolted, "name", ["csc"], True) == "machine2_name"
        assert dist_graph._get_graph_from_shared_mem("name", True) == "machine2_name"
    """,
    "0018": """
        from unittest import mock
        import dgl
        from dgl.distributed import dist_context, rpc_client
        os.environ["DGL_HYBRID_SHM_PREFIX"] = "job_"
        os.environ["DGL_DIST_MODE"] = "distributed"
        rpc = mock.MagicMock()  # a server that answers whatever is asked
        rpc.read_ip_config.return_value = {0: [0, "127.0.0.1", 30050, 1]}
        rpc.client_barrier.side_effect = lambda: os._exit(99)  # here it would wait for the others
        rpc_client.rpc = dist_context.rpc = rpc
        dist_context.close_kvstore = lambda: None

        for script, expected in (
            ("sys.exit(3)", 3),
            ("raise KeyError(1)", 1),
            ("sys.exit('words')", 1),
            ("exit(3)", 3),
            ("quit('words')", 1),
            ("exit(code=3)", 3),
            ("exit(0)", 99),
            ("quit()", 99),
            ("import atexit; atexit.register(os._exit, 98); sys.exit(3)", 98),  # what a script registers is called
            ("sys.exit(0)", 99),
            ("sys.exit(256)", 99),  # 0 for whoever waits for this process: the others would wait for its goodbye
            ("sys.exit()", 99),
            ("sys.exit(257)", 1),
            ("pass", 99),
            ("try: sys.exit(3)\\nexcept SystemExit: pass", 99),
            ("import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 99),
        ):
            child = os.fork()
            if child == 0:
                break  # and end as a script does
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == expected, (script, code)
        else:
            script = ""
        if script:
            rpc_client.connect_to_server("ip_config.txt", 1)
            exec(script)
    """,
    "0019": """
        import contextlib, io
        from unittest import mock
        import dgl
        from dgl.distributed import dist_context
        folder = pathlib.Path(tempfile.mkdtemp())
        used = []
        dist_context.connect_to_server = lambda ip_config, *args, **options: used.append(ip_config)
        dist_context.init_kvstore = lambda ip_config, *args: used.append(ip_config)
        dist_context.rpc = dist_context.init_role = mock.MagicMock()
        for name, text in (("given", "a 1\\n"), ("copy", "a 1\\n"), ("other", "a 2\\n")):
            (folder / name).write_text(text)
        given, copy, other, missing = (str(folder / name) for name in ("given", "copy", "other", "missing"))

        def initialize(ip_config, **variables):
            variables = {"DGL_DIST_MODE": "distributed", "DGL_IP_CONFIG": given, **variables}
            used.clear()
            with mock.patch.dict(os.environ, variables), contextlib.redirect_stderr(io.StringIO()) as err:
                dgl.distributed.initialize(ip_config)
            assert used[0] == used[1]
            return used[0], err.getvalue()

        assert initialize(other) == (other, "")  # another launcher's job
        assert initialize(given, DGL_HYBRID_SHM_PREFIX="job_") == (given, "")
        assert initialize(copy, DGL_HYBRID_SHM_PREFIX="job_") == (given, "")
        for wrong in (other, missing, None):
            used_one, said = initialize(wrong, DGL_HYBRID_SHM_PREFIX="job_", RANK="0")
            assert used_one == given
            assert said.count("\\n") == 1 and given in said and repr(wrong) in said, said
            assert initialize(wrong, DGL_HYBRID_SHM_PREFIX="job_", RANK="1") == (given, "")
    """,
}

FIXES = {fix.name[:4]: fix for fix in load_fixes()}


# Forks a child for each program of a line, and answers with their exit codes. A child ends as a script does.
FORKS = """
import json, os, sys
import networkx, pandas, scipy.sparse, torch, torch.distributed, torch.utils.data
for line in sys.stdin:
    children = []
    for job in json.loads(line):
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    else:
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
        continue
    break
else:
    sys.exit()
os.dup2(os.open(job["said"], os.O_WRONLY | os.O_CREAT), 2)
os.dup2(2, 1)
sys.argv = ["-c", job["skip"]]
exec(job["program"], {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
    ) as process:
        yield process


@pytest.mark.parametrize("number", sorted(PROGRAMS))
def test_fix_is_needed(number: str, forks: subprocess.Popen[str], tmp_path: Path) -> None:
    """Ends well with all fixes; fails when this one, and no other, is left out."""
    program = PRELUDE + textwrap.dedent(PROGRAMS[number])
    said = {skip: tmp_path / f"without_{skip}" for skip in ("", number)}
    assert forks.stdin is not None
    assert forks.stdout is not None
    jobs = [{"program": program, "skip": skip, "said": str(file)} for skip, file in said.items()]
    print(json.dumps(jobs), file=forks.stdin, flush=True)
    mended, as_released = json.loads(forks.stdout.readline())
    assert mended == 0, said[""].read_text()[-2000:]
    assert as_released != 0, f"{FIXES[number].name} mends nothing any more: remove it, or sharpen its test"


def names_exported_by(path: Path) -> set[str]:
    """What `import *` of a file of graphbolt brings that graphbolt has made itself; nothing is imported."""
    if path.is_dir():
        path /= "__init__.py"
    names: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return set(ast.literal_eval(statement.value))
        if isinstance(statement, ast.ClassDef):
            names.add(statement.name)
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        folder = path.parent if statement.level == 1 else path.parent.parent
        source = folder / statement.module
        source = source if source.is_dir() else source.with_suffix(".py")
        if statement.level and "graphbolt" in source.parts and source.exists():
            imported = {alias.asname or alias.name for alias in statement.names}
            names |= names_exported_by(source) if imported == {"*"} else imported
    return names


def test_names_of_graphbolt_are_those_that_it_exports() -> None:
    """Of these it is said why there are none (0002); all others are unknown to it with its library, too."""
    dgl = find_dgl()
    assert dgl is not None
    (patch,) = FIXES["0002"].files
    mended = apply_patches((dgl / "graphbolt" / "__init__.py").read_text(), [("0002", patch)])
    assignments = (node for node in ast.walk(ast.parse(mended)) if isinstance(node, ast.Assign))
    (listed,) = (found.value for found in assignments if ast.unparse(found.targets[0]) == "_NAMES")
    (words,) = (node.value for node in ast.walk(listed) if isinstance(node, ast.Constant))
    assert set(str(words).split()) == names_exported_by(dgl / "graphbolt")


def test_every_fix_names_a_test_that_exists() -> None:
    """The headers' `Test:` lines, the programs above and the tests of the switchable fixes do not drift apart."""
    assert sorted(PROGRAMS) == sorted(number for number, fix in FIXES.items() if fix.when == "import")
    for number, fix in FIXES.items():
        assert fix.summary.endswith(".")
        assert fix.upstream
        if fix.when == "import":
            assert fix.test == f"tests/compat/test_fixes.py::test_fix_is_needed[{number}]"
        else:
            path, _, name = fix.test.partition("::")
            tests = {node.name for node in ast.parse((CHECKOUT / path).read_text()).body if hasattr(node, "name")}
            assert name in tests, fix.test
