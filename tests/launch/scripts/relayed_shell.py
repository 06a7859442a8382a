# SPDX-License-Identifier: Apache-2.0
"""Stands in for ssh: runs a command through a shell in an environment of its own, and carries what both sides say.

Called with options, an address and a command. `RELAY_PREFIX` (words separated by blanks, {address} filled in) runs it
elsewhere. Like a login shell, it greets first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def main() -> int:
    address, command = sys.argv[-2:]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    prefix = os.environ.get("RELAY_PREFIX", "").format(address=address).split()
    process = subprocess.Popen(
        [*prefix, "sh", "-c", f"echo Welcome to {address}; {command}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**kept, "ON_HOST": address},
        cwd="/",  # where a login begins is not where the job was started
        start_new_session=True,  # on another host it would not be ended with this process either
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def carry(source: int, target: int) -> None:
        while data := os.read(source, 65536):
            while data:
                data = data[os.write(target, data) :]
        os.close(target)

    threading.Thread(target=carry, args=(0, process.stdin.fileno()), daemon=True).start()
    carry(process.stdout.fileno(), 1)
    code = process.wait()
    return code if code >= 0 else 255  # as ssh does


if __name__ == "__main__":
    sys.exit(main())
