# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid launch … script.py …`: DistDGL servers and trainers of all machines, here or over ssh."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dgl_hybrid.cli.plugin import OFF, add_plugin_options, plugin_environment
from dgl_hybrid.cli.script_words import USAGE, check_script
from dgl_hybrid.launch.cluster import SSH, ClusterFailure, ClusterJob, ClusterResult, run_cluster
from dgl_hybrid.partition.signals import ending_signals_raise
from dgl_hybrid.sampling.config import ENABLE_VARIABLE

TAKES_SCRIPT = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options, named as in DGL's own launcher where that has them; `_` serves for `-`."""
    parser.usage = USAGE
    parser.epilog = (
        "Every server and trainer runs PYTHON SCRIPT ARGUMENT .... What comes after the script is the script's. "
        "When a part dies, all are ended, its last lines are shown, and its exit code is ours (128 and the signal's "
        "number if it was killed). TMPDIR of the parts is a folder that is removed at the end."
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "--workspace", type=Path, metavar="DIR", help="folder in which the script runs, on every host [the current one]"
    )
    job.add_argument(
        "--part-config", type=Path, metavar="FILE", required=True, help="the partition's JSON file (in the workspace)"
    )
    job.add_argument(
        "--ip-config",
        type=Path,
        metavar="FILE",
        help="a line with address and port for each partition (in the workspace); parts on other hosts are started by "
        "ssh; trainers use it whatever file the script names [this host and free ports; the script finds the file's "
        "name in DGL_IP_CONFIG]",
    )
    for name, default, text in (
        ("trainers", 1, "trainers of each machine"),
        ("servers", 1, "servers of each machine, one of them the main one"),
        ("samplers", 0, "sampler processes of each trainer"),
    ):
        job.add_argument(f"--num-{name}", type=int, metavar="N", default=default, help=f"{text} [{default}]")
    job.add_argument(
        "--num-omp-threads", type=int, metavar="N", help="threads of each trainer [its share of the host's cores]"
    )
    job.add_argument(
        "--graph-format", metavar="FORMATS", default="csc", help="formats that servers keep: csc,csr,coo [csc]"
    )
    job.add_argument(
        "--python", metavar="PROGRAM", default=sys.executable, help="the interpreter, on every host [this one]"
    )
    job.add_argument(
        "--extra-envs",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of all parts; may be given several times",
    )
    job.add_argument("--ssh-port", type=int, metavar="PORT", help="of other hosts [ssh's own choice]")
    job.add_argument("--ssh-username", metavar="NAME", help="on other hosts [ssh's own choice]")
    job.add_argument(
        "--timeout-s", type=float, metavar="S", help="end the job after so long, with exit code 124 [never]"
    )
    job.add_argument(
        "--start-timeout-s", type=float, metavar="S", default=1800.0, help="until all servers must listen [1800]"
    )
    add_plugin_options(parser, can_be_off=True)
    group = parser.add_argument_group("general")
    group.add_argument(
        "--json", action="store_true", help="end with one JSON object on the last line of stdout, also when a part dies"
    )
    group.add_argument("--verbose", action="store_true", help="show what servers write, too")
    group.add_argument("--debug", action="store_true", help="show tracebacks of our own faults")


def run(args: argparse.Namespace) -> int:
    """Runs the job to its end."""
    job = make_job(args)
    try:
        with ending_signals_raise():
            result = run_cluster(job, verbose=args.verbose)
    except ClusterFailure as error:
        if error.details and not args.debug:
            print(error.details, file=sys.stderr)
        if args.json and error.result is not None:
            print(json.dumps(to_json(error.result)), flush=True)
        raise
    if args.json:
        print(json.dumps(to_json(result)))
    return 0


def make_job(args: argparse.Namespace) -> ClusterJob:
    """Returns the job that the command line describes.

    Raises:
        ValueError: It describes none.
    """
    environment = {}
    for text in args.extra_envs:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--extra-envs must be NAME=VALUE (got {text!r})")
        environment[name] = value
    if ENABLE_VARIABLE in environment:
        raise ValueError(
            f"--extra-envs {ENABLE_VARIABLE}=... would be overridden by --strategy and --budget: give these, or "
            f"--strategy {OFF} for stock DGL"
        )
    ssh = [*SSH]
    if args.ssh_port is not None:
        if not 1 <= args.ssh_port <= 65535:
            raise ValueError(f"--ssh-port must lie in 1..65535 (got {args.ssh_port})")
        ssh += ["-p", str(args.ssh_port)]
    if args.ssh_username is not None:
        ssh += ["-l", args.ssh_username]
    return ClusterJob(
        part_config=args.part_config,
        command=check_script(args.script),
        python=args.python,
        workspace=args.workspace,
        ip_config=args.ip_config,
        num_servers=args.num_servers,
        num_trainers=args.num_trainers,
        num_samplers=args.num_samplers,
        graph_format=args.graph_format,
        threads=args.num_omp_threads,
        environment={**environment, **plugin_environment(args)},
        timeout_s=args.timeout_s,
        start_timeout_s=args.start_timeout_s,
        remote_shell=tuple(ssh),
    )


def to_json(result: ClusterResult) -> dict[str, object]:
    """Returns what `--json` prints."""
    return {
        "exit_code": result.exit_code,
        "elapsed_s": result.elapsed_s,
        "parts": [
            {
                "name": one.part.name,
                "machine": one.part.machine.machine_id,
                "address": one.part.machine.address,
                "exit_code": one.exit_code,
                "elapsed_s": one.elapsed_s,
                "last_lines": list(one.last_lines),
            }
            for one in result.parts
        ],
    }
