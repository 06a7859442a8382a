# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import dgl
import numpy as np
import pytest
import torch

from dgl_hybrid.cli import demo, main, partition, plan, torchrun, train
from dgl_hybrid.cli.common import versions
from dgl_hybrid.cli.one_line_parser import OneLineParser
from dgl_hybrid.cli.options import add_config_options, field_docs, flatten, parse_bytes, read_config_file, resolve
from dgl_hybrid.cli.run import interpreter_options
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig

# Frozen on purpose: a new knob belongs in a dataclass that has an owner, and is added here with thought.
TRAIN_OPTIONS = {
    *("data", "symmetric", "self_loops", "normalize_features"),
    *("ranks", "part_method", "num_hops", "partition", "workspace"),
    *("model", "num_layers", "hidden", "heads", "dropout"),
    *("strategy", "cache_ratio", "memory_budget", "plan"),
    *("epochs", "lr", "weight_decay", "eval_every", "dtype", "device", "seed", "exchange_timeout_s", "approximate"),
    *("checkpoint", "resume"),
    *("threads", "out"),
}


def parse(*words: str) -> argparse.Namespace:
    parser = OneLineParser(prog="p")
    train.add_options(parser)
    return parser.parse_args(words)


def test_options_are_the_known_ones() -> None:
    assert {field.name for config in train.CONFIGS for field in fields(config)} == TRAIN_OPTIONS
    assert set(main.COMMANDS) == {"demo", "partition", "plan", "train", "launch", "run", "doctor"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (train, TRAIN_OPTIONS),
        (plan, TRAIN_OPTIONS - {"plan", "checkpoint", "resume"} | {"explain", "explain_global"}),
        (
            partition,
            {*("data", "symmetric", "self_loops", "normalize_features"), *("ranks", "part_method", "num_hops")}
            | {"workspace", "out"},
        ),
    ],
)
def test_commands_have_the_options_that_have_an_effect(command: ModuleType, expected: set[str]) -> None:
    parser = OneLineParser(prog="p")
    command.add_options(parser)
    general = {"help", "config", "print_config", "json", "verbose", "debug"}
    assert {action.dest for action in parser._actions} - general == expected


def help_of(command: ModuleType) -> dict[str, str]:
    parser = OneLineParser(prog="p")
    command.add_options(parser)
    return {action.dest: action.help or "" for action in parser._actions}


def test_help_says_what_the_command_does() -> None:
    """An option that several commands have may do another thing in each."""
    texts = {command: help_of(command) for command in (train, plan, partition)}
    assert len({texts[command]["out"] for command in texts}) == 3
    assert "by default for the model gcn" in texts[train]["symmetric"]
    assert "not done unless given" in texts[partition]["symmetric"], "partition knows no model"
    assert texts[plan]["epochs"].startswith("No effect on a plan")
    assert plan.TEXTS.keys() | partition.TEXTS.keys() <= TRAIN_OPTIONS


@pytest.mark.parametrize("config", [*train.CONFIGS, *plan.CONFIGS, *partition.CONFIGS, demo.DemoConfig])
def test_every_option_is_explained(config: type) -> None:
    assert set(field_docs(config)) == {field.name for field in fields(config)}


def test_defaults_run() -> None:
    configs = resolve(parse(), train.CONFIGS)
    assert flatten(configs) == flatten([config() for config in train.CONFIGS])


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_the_command_line_outranks_the_file_and_the_file_the_default(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"c.{suffix}"
    text = '{"num-layers": 4, "lr": 1, "memory_budget": "2kB", "symmetric": true}'
    file.write_text(text if suffix == "json" else 'num_layers = 4\nlr = 1\nmemory_budget = "2kB"\nsymmetric = true\n')
    flat = flatten(resolve(parse("--config", str(file), "--num-layers", "3"), train.CONFIGS))
    assert (flat["num_layers"], flat["lr"], flat["memory_budget"], flat["symmetric"]) == (3, 1.0, 2000.0, True)
    assert flat["hidden"] == 64


def test_a_printed_config_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "--hidden", "7", "--memory-budget", "1MiB", "--no-self-loops", "--print-config"]
    assert main.main(given) == 0
    printed = capsys.readouterr().out
    (tmp_path / "c.json").write_text(printed)
    assert main.main(["train", "--config", str(tmp_path / "c.json"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert json.loads(printed)["memory_budget"] == 2**20
    assert json.loads(printed)["self_loops"] is False
    assert main.main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(printed)


@pytest.mark.parametrize(
    ("text", "expected"), [("200", 200), ("200e6", 2e8), ("1.5GB", 1.5e9), ("2 MiB", 2**21), ("3k", 3000), ("7B", 7)]
)
def test_bytes(text: str, expected: float) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "12XB", "1.2.3"])
def test_wrong_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be bytes such as 200e6 or 200MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", r"must hold options by name \(got list\)"),
        ('{"layers": 3}', "unknown option 'layers'; there are approximate, cache_ratio"),
        ('{"num_layers": "3"}', r"num_layers must be of type int \(got '3'\)"),
        ('{"epochs": true}', r"epochs must be of type int \(got True\)"),
        ('{"memory_budget": "many"}', "memory_budget must be bytes"),
        ('{"strategy": "foo"}', r"unknown strategy \(got 'foo'\)"),
        ('{"epochs": 3, "epochs": 4}', "epochs is given twice"),
        ('{"eval_every": 3, "eval-every": 4}', r"config file .*c\.json: eval_every is given twice"),
    ],
)
def test_wrong_config_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        resolve(parse("--config", str(file)), train.CONFIGS)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_ranks_that_torchrun_has_not_started(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ValueError, match=r"WORLD_SIZE must be numbers, as torchrun sets them \(invalid .*'abc'\)"):
        torchrun.train_under_torchrun(resolve(parse(), train.CONFIGS))


@pytest.mark.parametrize(
    ("interface", "error", "message"),
    [
        ("nosuch0", ValueError, r"GLOO_SOCKET_IFNAME is nosuch0, and this host has no such .* \(it has .*lo\b"),
        ("lo", RuntimeError, "^Unable to find address$"),
    ],
)
def test_an_interface_that_gloo_does_not_find(
    interface: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*args: object) -> None:
        raise RuntimeError("Unable to find address")

    for name, value in {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": interface}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun.dist, "init_process_group", meet)
    monkeypatch.setattr(torchrun.torch, "set_num_threads", lambda number: None)
    with pytest.raises(error, match=message):
        torchrun.train_under_torchrun(resolve(parse(), train.CONFIGS))


def test_files_of_other_kinds_are_said_to_be_read_as_json(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\n")
    with pytest.raises(ValueError, match=r"c\.yaml is not valid JSON, as which all but \.toml files are read"):
        resolve(parse("--config", str(file)), train.CONFIGS)
    file.rename(tmp_path / "c.TOML").write_text("epochs = 3\n")
    assert resolve(parse("--config", str(tmp_path / "c.TOML")), train.CONFIGS)[-2].epochs == 3


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "--strategy", "foo"], 2, "argument --strategy: invalid choice: 'foo'"),
        (["train", "--model", "mlp"], 2, "argument --model: invalid choice: 'mlp'"),
        (["train", "--num-layers", "two"], 2, "argument --num-layers: invalid int value: 'two'"),
        (["train", "--unknown"], 2, "dgl-hybrid train: error: unrecognized arguments: --unknown\n"),
        (["train", "--rank", "2"], 2, "train: error: unrecognized arguments: --rank 2 (did you mean --ranks?)"),
        (["demo", "--epoch=3", "--no-distgl"], 2, "--no-distgl (did you mean --epochs, --no-distdgl?)"),
        (["fly"], 2, "invalid choice: 'fly'"),
        ([], 2, "the following arguments are required: COMMAND"),
        (["train", "--seed", "-1"], 1, r"seed must lie in 0..2**32-1 (got -1)"),
        (["train", "--data", "nope"], 1, "unknown dataset 'nope'"),
        (["train", "--data", "nope.npz"], 1, "nope.npz"),
        (["train", "--config", "nope.json"], 1, "config file nope.json cannot be read: No such file"),
        (["train", "--partition", "nope"], 1, "nope does not exist. Give a partition folder"),
        (["train", "--ranks", "0"], 1, "ranks must be at least 1 (got 0)"),
        (["train", "--threads", "0"], 1, "threads must be at least 1 and at most 4096 (got 0)"),
        (["plan", "--threads", "1000000"], 1, "threads must be at least 1 and at most 4096 (got 1000000)"),
        (["train", "--lr", "1e300"], 1, "lr must be positive and weight_decay not negative (got 1e+300 and 0.0005)"),
        (["train", "--weight-decay", "1e40"], 1, "both finite in float32"),
        (["train", "--partition", "parts", "--symmetric"], 1, "--symmetric cannot be given with --partition"),
        (["train", "--partition", "parts", "--no-self-loops"], 1, "--no-self-loops cannot be given with --partition"),
        (
            ["plan", "--partition", "parts", "--data", "x.npz", "--normalize-features", "--num-hops", "2"],
            1,
            "--data, --normalize-features, --num-hops cannot be given with --partition: the graph in parts was loaded",
        ),
        (["partition", "--data", "nope", "--out", ""], 1, "--out must not be empty; leave it out for its default"),
        (["train", "--checkpoint", ""], 1, "--checkpoint must not be empty"),
        (["demo", "--hidden", "0"], 1, "hidden must be at least 1 (got 0)"),
        (["train", "--data", "of two\nlines.npz"], 1, "of two lines.npz does not exist"),
        (["plan", "--plan", "x"], 2, "unrecognized arguments: --plan x"),
        (["partition", "--partition", "x"], 2, "unrecognized arguments: --partition x"),
        (["partition", "--threads", "2"], 2, "unrecognized arguments: --threads 2"),
        (["train", "--partition", "parts", "--workspace", "w"], 1, "--workspace cannot be given with --partition"),
        (["plan", "--partition", "parts", "--workspace", "w"], 1, "--workspace cannot be given with --partition"),
        (
            ["partition", "--data", "nope", "--out", "o", "--workspace", "w"],
            1,
            "--workspace cannot be given with --out",
        ),
    ],
)
def test_wrong_words_end_in_one_line(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words and words[0] == "train" and "--partition" not in words:
        words = [*words, "--workspace", str(tmp_path)]
    try:
        found = main.main(words)
    except SystemExit as error:
        found = error.code if isinstance(error.code, int) else -1
    captured = capsys.readouterr()
    assert found == code
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("dgl-hybrid")
    assert message in captured.err


def test_what_torchrun_sets_and_did_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old `export RANK=0` of a shell."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # which is set where it is not
    monkeypatch.setattr(torchrun.torch, "set_num_threads", lambda number: None)
    assert main.main(["train", "--workspace", str(tmp_path), "--threads", "1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert "MASTER_ADDR" in error
    assert "unset RANK and WORLD_SIZE to train on ranks that this command starts" in error


def test_memory_that_lacks_is_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lacks(*_: object) -> None:
        raise MemoryError("Unable to allocate 728. TiB")

    monkeypatch.setattr("dgl_hybrid.cli.doctor.run", lacks)
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().err == "dgl-hybrid doctor: error: not enough memory: Unable to allocate 728. TiB\n"


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + b'{"epochs": 7}', b"[" * 100_000])
def test_files_of_other_editors(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(content)
    if content.startswith(b"["):
        with pytest.raises(ValueError, match=r"c\.json is not valid JSON"):
            read_config_file(file)
    else:
        assert read_config_file(file) == {"epochs": 7}


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("plan", {"plan": "x"}, "choose where new ones go with --out"),
        ("plan", {"data": "nope", "checkpoint": "x"}, "checkpoint is no option of this command: nothing is trained"),
        ("plan", {"data": "nope", "resume": True}, "resume is no option of this command: nothing is trained"),
        ("partition", {"partition": "x"}, "name the new one with --out"),
        ("partition", {"data": "nope", "threads": 2}, "c.json: threads is no option of this command: one process"),
        ("partition", {"data": "nope", "out": "o", "workspace": "w"}, "--workspace cannot be given with --out"),
        ("train", {"partition": "x", "workspace": "w"}, "--workspace cannot be given with --partition"),
        ("train", {"partition": "x", "symmetric": True}, "--symmetric cannot be given with --partition"),
        ("train", {"partition": "x", "part_method": "random"}, "--part-method cannot be given with --partition"),
    ],
)
def test_config_files_that_ask_for_two_things(
    command: str, content: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert main.main([command, "--config", str(tmp_path / "c.json")]) == 1
    assert message in capsys.readouterr().err


def test_a_printed_config_goes_with_an_existing_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names every option: those at their default are not taken for wishes."""
    assert main.main(["train", "--partition", str(tmp_path / "none"), "--print-config"]) == 0
    (tmp_path / "c.json").write_text(capsys.readouterr().out)
    assert main.main(["train", "--config", str(tmp_path / "c.json")]) == 1
    assert "none does not exist. Give a partition folder" in capsys.readouterr().err


def test_a_config_that_train_printed_goes_for_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `plan` has no option for is at its default there, and no wish."""
    assert main.main(["train", "--hidden", "7", "--print-config"]) == 0
    (tmp_path / "c.json").write_text(capsys.readouterr().out)
    assert main.main(["plan", "--config", str(tmp_path / "c.json"), "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"] == 7


def test_options_of_one_command_do_not_leak(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="p")
    add_config_options(parser, (demo.DemoConfig,))
    assert set(vars(parser.parse_args(["--epochs", "3"]))) == {"epochs"}


def test_versions_are_those_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what pip knows: of a DGL that was built from source it knows nothing, or another copy."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    found = versions()
    assert (found["dgl"], found["torch"], found["numpy"]) == (dgl.__version__, torch.__version__, np.__version__)
    monkeypatch.setattr("dgl_hybrid.cli.common.dgl_version", lambda: None)
    assert versions()["dgl"] == "none"


def test_doctor_says_what_compiles_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert re.fullmatch(r"LLVM [\d.]+ \(llvmlite [\d.]+\), vectors of (128|256|512) bits", facts["cpu_kernels"])
    # With NVRTC and a GPU, with one of them, or with neither: always a word.
    assert re.match(r"NVRTC [\d.]+ (compiles, nothing runs: |for )|none: ", facts["cuda_kernels"])


def test_what_hinders_dgl_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands import DGL before they run, and `doctor` is for the time when that fails."""
    monkeypatch.setitem(sys.modules, "dgl", None)
    assert main.main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("dgl-hybrid doctor: error: dgl cannot be imported: ModuleNotFoundError: ")
    assert re.search(
        r"Installed: dgl [\d.]+, torch [\d.+a-z]+, numpy [\d.]+; dgl_hybrid is for DGL >=2.1,<2.2\n$", said
    )
    monkeypatch.setattr(main, "import_module", broken_import)
    assert main.main(["train"]) == 1
    said = capsys.readouterr().err
    assert (
        said
        == "dgl-hybrid train: error: unexpected ImportError: libdgl.so: no such file (--debug shows the traceback)\n"
    )
    with pytest.raises(ImportError, match=r"libdgl\.so"):
        main.main(["train", "--debug"])


def broken_import(name: str) -> None:
    raise ImportError("libdgl.so: no such file")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -u -m dgl_hybrid.cli run train.py -u", "-u"),
        ("python -um dgl_hybrid.cli run -X train.py", "-u"),
        ("python -X dev -W error -Xfaulthandler -OO -m dgl_hybrid.cli run", "-Xdev -Werror -Xfaulthandler -O -O"),
        ("python -uXimporttime -qWmodule -m dgl_hybrid.cli run", "-u -Ximporttime -q -Wmodule"),
        ("python -uX dev -uc code -q", "-u -Xdev -u"),
        ("python --check-hash-based-pycs never -b /bin/dgl-hybrid run -u x", "-b"),
        ("python3 -sPu /bin/dgl-hybrid run train.py", "-u"),
        ("python /bin/dgl-hybrid run -u", ""),
        ("python", ""),
    ],
)
def test_a_script_is_run_with_the_options_of_the_interpreter(words: str, expected: str) -> None:
    """`torchrun` starts workers with -u; without it, what a rank had said when it was ended would be lost."""
    assert interpreter_options(words.split()) == expected.split()


def test_gloo_is_told_by_which_interface_rank_0_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It guessed by the host's name, which is 127.0.1.1 on Debian: other hosts could not connect."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert torchrun._find_interface(is_one_host=True) is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert torchrun._find_interface(is_one_host=True) == torchrun.LOOPBACK
    # The name of rank 0's host, on that host: loopback serves no other.
    assert torchrun._find_interface(is_one_host=False) is None
    monkeypatch.setattr(torchrun, "find_interface", {"127.0.0.1": "eth7"}.get)
    assert torchrun._find_interface(is_one_host=False) == "eth7"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert torchrun._find_interface(is_one_host=False) is None


def test_plans_that_differ_have_folders_of_their_own() -> None:
    """One within a memory budget was replaced by the next one without."""
    options: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {}, {}),
        ({"heads": 2}, {}, {}),
        ({"dropout": 0.25}, {}, {}),
        ({}, {"memory_budget": 2e8}, {}),
        ({}, {"strategy": "ratio"}, {}),
        ({}, {"strategy": "ratio", "cache_ratio": 0.3}, {}),
        ({}, {}, {"dtype": "float64"}),
        ({}, {}, {"approximate": "bf16"}),
    ]
    names = [plan.folder_name(ModelConfig(**m), StrategyConfig(**s), TrainConfig(**t)) for m, s, t in options]
    assert names[0] == "gcn-2x64-hybrid"
    assert names[3] == "gcn-2x64-hybrid-memory_budget-200000000"
    assert len(set(names)) == len(names)
    same = plan.folder_name(ModelConfig(), StrategyConfig(), TrainConfig(epochs=3, lr=0.5, seed=7))
    assert same == names[0], "what has no effect on a plan"
