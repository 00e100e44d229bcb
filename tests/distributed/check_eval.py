"""Runs command lines of `megatron-calclip` one after another, so that their imports are paid for once.

    check_eval.py COMMANDS

COMMANDS is a JSON file with a list of argument lists. Under torchrun there may be only one, since its ranks meet once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_calclip.cli import main

if __name__ == "__main__":
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        main(arguments)
