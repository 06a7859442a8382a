# SPDX-License-Identifier: Apache-2.0
"""Entry point: finds the command, and turns every fault into one line on stderr and a non-zero exit."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn

import dgl_hybrid
from dgl_hybrid.cli.one_line_parser import CommandParser, OneLineParser
from dgl_hybrid.cli.script_words import split_words
from dgl_hybrid.compat.closed_streams import open_closed_streams
from dgl_hybrid.errors import HybridError
from dgl_hybrid.launch.cluster import ClusterFailure
from dgl_hybrid.partition.signals import EndedBySignal

# Command -> (module with add_options(parser) and run(args) -> exit code, help); imported when asked for. A module with
# TAKES_SCRIPT finds in `args.script` what follows its own options.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("dgl_hybrid.cli.demo", "train one model in three ways beside plain DGL and DistDGL, draw the result"),
    "partition": ("dgl_hybrid.cli.partition", "split a graph into a folder that DistDGL reads too"),
    "plan": ("dgl_hybrid.cli.plan", "decide what is cached and what is communicated, and say why"),
    "train": ("dgl_hybrid.cli.train", "train full-graph on several ranks"),
    "launch": (
        "dgl_hybrid.cli.launch",
        "run a DistDGL script on several machines: servers and trainers, here or over ssh",
    ),
    "run": ("dgl_hybrid.cli.run", "run a DistDGL script unchanged, with the plugin switched on"),
    "doctor": ("dgl_hybrid.cli.doctor", "show versions, active fixes and what this machine offers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0; 1 for a fault or a value that is refused; 130 after Ctrl-C; of a job
    that of what died, or 128 and the number of the signal. Words that are no options end the process with 2.
    """
    open_closed_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    prefix = f"dgl-hybrid {next((word for word in argv if word in COMMANDS), '')}".rstrip() + ": error:"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        prefix = f"[{os.environ['RANK']}/{os.environ['WORLD_SIZE']}] {prefix}"
    debug = "--debug" in argv  # until it is known whose word that is
    try:
        with _ctrl_c_leaves(prefix):
            parser, argv, script = _build_parser(argv)
        args = parser.parse_args(argv)
        args.script = script
        debug = getattr(args, "debug", False)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO if getattr(args, "verbose", False) else logging.WARNING,
            format="dgl-hybrid: %(levelname)s %(name)s: %(message)s",
        )
        code: int = import_module(COMMANDS[args.command][0]).run(args)
        return code
    except KeyboardInterrupt:
        print(f"{prefix} interrupted", file=sys.stderr)
        return 130
    except EndedBySignal as error:
        with contextlib.suppress(OSError):  # a terminal that has gone
            print(f"{prefix} ended by {error.name}", file=sys.stderr, flush=True)
        raise
    except BrokenPipeError:
        return 1  # whoever read our output has left
    except (HybridError, ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
            details = getattr(error, "details", "")
            if details:
                print(details, file=sys.stderr)
        print(f"{prefix} {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code if isinstance(error, ClusterFailure) else 1
    except MemoryError as error:
        if debug:
            raise
        print(f"{prefix} not enough memory: {' '.join(str(error).split()) or 'none is left'}", file=sys.stderr)
        return 1
    except Exception as error:
        if debug:
            raise
        words = " ".join(str(error).split())
        print(f"{prefix} unexpected {type(error).__name__}: {words} (--debug shows the traceback)", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _ctrl_c_leaves(prefix: str) -> Iterator[None]:
    """Has Ctrl-C end this process at once, where libraries are imported and nothing has been begun yet.

    Some take a KeyboardInterrupt in the midst of that for what they lack, and go on without it.
    """

    def leave(number: int, frame: object) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"{prefix} interrupted\n".encode())
        os._exit(130)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """Returns the parser, the words for it, and the script's words if the command takes a script."""
    parser = OneLineParser(
        prog="dgl-hybrid", description="Full-graph GNN training on partitioned graphs, beside DGL and DistDGL."
    )
    parser.add_argument("--version", action="version", version=f"dgl_hybrid {dgl_hybrid.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    at = next((at for at, word in enumerate(argv) if not word.startswith("-")), len(argv))
    own = list(argv)
    script: list[str] = []
    for name, (module, text) in COMMANDS.items():
        # Whole names only: what a script's words are is told by these.
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if argv[at : at + 1] == [name]:
            chosen = import_module(module)
            chosen.add_options(command)
            if getattr(chosen, "TAKES_SCRIPT", False):
                options, script = split_words(command, argv[at + 1 :])
                own = [*argv[: at + 1], *options]
    return parser, own, script


if __name__ == "__main__":
    sys.exit(main())
