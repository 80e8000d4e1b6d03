"""Memory of the engine process beside weights and KV cache, fresh and after a load that fills the cache.

    python -m benchmarks.engine.memory [--quick]

A real server with the bundled model. KV memory becomes resident as it is written: a fresh server has none of
it, so nothing is subtracted for it; after the load all of it is. Bar: at most 700 MB more.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.loadgen.own_server import OwnServer, own_server

BAR_MB = 700
PROMPT = 1900
"""Tokens of each prompt of the load: unlike each other, so that none shares a block."""
FLAGS = {"max_model_len": 2048, "disable_uvicorn_access_log": True}


def planned(log: str) -> tuple[float, float, float, int]:
    """Weights, activations and KV in MB, and the KV's tokens, as the server's log has them."""
    sizes = re.search(r"weights ([\d,]+) MiB - activations ([\d,]+) MiB .*= KV ([\d,]+) MiB", log)
    tokens = re.search(r"KV cache: ([\d,]+) tokens", log)
    assert sizes is not None
    assert tokens is not None
    weights, activations, kv = (int(text.replace(",", "")) * 1.048576 for text in sizes.groups())
    return weights, activations, kv, int(tokens[1].replace(",", ""))


def resident(pid: int) -> Counter[str]:
    """MB of the process by what they belong to: shared libraries by name, files, and anonymous memory."""
    found: Counter[str] = Counter()
    owner = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            owner = _owner(words[5] if len(words) > 5 else "")
        elif words[0] == "Rss:":
            found[owner] += int(words[1])
    return Counter({name: kib * 1024 / 1e6 for name, kib in found.items()})


def _owner(path: str) -> str:
    name = Path(path).name
    if not path or path.startswith(("[", "/dev/zero", "/memfd")):
        return "anonymous memory"
    if "torch" in path and ".so" in name:
        return "torch's libraries"
    if ".safetensors" in name:
        return "the checkpoint's file"
    return "other libraries and files"


def fill(server: OwnServer, tokens: int) -> None:
    """Write to every block of the KV cache at least once."""
    chooser = random.Random(0)
    prompts = [[chooser.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(-(-tokens // PROMPT))]

    def ask(prompt: list[int]) -> None:
        status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 8})
        if status != 200:
            raise SystemExit(f"{status}: {answer}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, prompts))


def torch_alone() -> float:
    """MB of an interpreter that has imported torch and nothing else."""
    code = "import torch, os; print(open(f'/proc/{os.getpid()}/statm').read().split()[1])"
    pages = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(pages) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the fresh server only")
    quick = parser.parse_args().quick
    with own_server(FLAGS) as server:
        weights, activations, kv, tokens = planned(server.log)
        print(f"planned: weights {weights:.0f} MB, activations {activations:.0f} MB, KV {kv:.0f} MB")
        rows = {"fresh": (resident(server.pid("EngineCore")), weights)}
        if not quick:
            fill(server, tokens)
            rows["loaded"] = (resident(server.pid("EngineCore")), weights + kv)
    print(f"torch alone: {torch_alone():.0f} MB\n")
    owners = sorted({name for found, _ in rows.values() for name in found})
    print("MB resident".ljust(30) + "".join(f"{state:>10}" for state in rows))
    for name in owners:
        print(f"{name:<30}" + "".join(f"{found[name]:>10.0f}" for found, _ in rows.values()))
    print(f"{'all':<30}" + "".join(f"{found.total():>10.0f}" for found, _ in rows.values()))
    beside = {state: found.total() - known for state, (found, known) in rows.items()}
    print(f"{'beside weights and KV':<30}" + "".join(f"{mb:>10.0f}" for mb in beside.values()))
    sys.exit(1 if max(beside.values()) > BAR_MB else 0)


if __name__ == "__main__":
    main()
