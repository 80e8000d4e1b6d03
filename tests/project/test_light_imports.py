"""`vtune --help` must not pay for torch or pandas: heavy modules are imported inside the commands."""

import json
import subprocess
import sys

HEAVY = {
    "fastapi",
    "jinja2",
    "numpy",
    "optuna",
    "pandas",
    "plotly",
    "prometheus_api_client",
    "prometheus_client",
    "requests",
    "rich",
    "scipy",
    "sklearn",
    "sqlalchemy",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "yaml",
}


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    probe = "import json, sys, vtune_cli; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(json.loads(ran.stdout))
