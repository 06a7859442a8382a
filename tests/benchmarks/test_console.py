# SPDX-License-Identifier: Apache-2.0
"""Tables of benchmarks can be read where they are printed to no terminal."""

from __future__ import annotations

import pytest
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.ops.at_once import print_table
from benchmarks.ops.products import HEAD


def test_a_piped_table_has_its_words_whole(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("100,000", "128 + 128 to 128", "2 products, bias, ReLU; first layer", *["1,234.5"] * 8)

    print_table(HEAD, [row])

    printed = capsys.readouterr().err.splitlines()
    assert any(all(word in line for word in HEAD) for line in printed)
    assert any(all(word in line for word in row) for line in printed)


@pytest.mark.parametrize("to_stderr", [False, True])
def test_tables_leave_stdout_to_programs(to_stderr: bool, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("column")
    table.add_row("value")

    make_console(to_stderr=to_stderr).print(table)

    out, err = capsys.readouterr()
    assert ("value" in err) is to_stderr
    assert ("value" in out) is not to_stderr
