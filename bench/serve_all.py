"""Run the benches of serving one after another, each with a limit of seconds: about 150 s on an H200.

    python bench/serve_all.py [--out FOLDER]

With `--out`, the lines of each bench are also written to a file of that folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = {
    "kernels": (25, ["decode_kernels.py", "--seconds", "20"]),
    "host": (20, ["engine_host.py"]),
    "serve": (35, ["serve.py", "--skip-transformers", "--profile"]),
    "experts": (
        100,
        ["serve.py", "--family", "qwen3_vl", "--preset", "30b-a3b", "--skip-transformers", "--profile"],
    ),
    "images": (75, ["serve_images.py", "--reference", "6"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; none: all")
    options = parser.parse_args()
    for name in options.names or BENCHES:
        limit, (script, *arguments) = BENCHES[name]
        began = time.perf_counter()
        output = open(options.out / f"{name}.txt", "w") if options.out else None  # noqa: SIM115
        try:
            command = [sys.executable, str(HERE / script), *arguments]
            code: object = subprocess.run(command, stdout=output, stderr=output, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"ended after its {limit} s"
        print(f"{name}: {code}, {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
