"""A separate environment for every framework, installed from the package index, all under one folder."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGES = {
    "flower": ["flwr[simulation]>=1.41,<1.42"],
    "pfl": ["pfl[pytorch]"],
    "fluke": ["fluke-fl"],
}
SAME = ("torch", "timm", "safetensors")  # in the versions of this environment, so that arithmetic is the same


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of a framework's environment, which is created if it does not exist."""
    place = (folder / name).resolve()
    python = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    same = [f"{package}=={version(package).partition('+')[0]}" for package in SAME]
    wanted = [*PACKAGES[name], *same]
    stamp = place / "installed.txt"
    if stamp.is_file() and stamp.read_text().split("\n") == wanted and python.exists():
        return python
    print(f"creating an environment for {name}: {', '.join(wanted)}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    uv = uv_command()
    if uv is not None:  # one cache for all environments, so that the second one costs next to nothing
        call(uv, "venv", "--quiet", "--python", sys.executable, str(place))
        # Compile now, as pip does, because otherwise the first run would pay for that.
        call(uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *wanted)
    else:
        call(sys.executable, "-m", "venv", str(place))
        call(str(python), "-m", "pip", "install", "--quiet", *wanted)
    stamp.write_text("\n".join(wanted))
    return python


def uv_command() -> str | None:
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.is_file() else shutil.which("uv")


def call(*command: str) -> None:
    """Run an installer; if it fails, give its last words as the reason."""
    polite = ["nice", "-n", "10"] if shutil.which("nice") else []
    done = subprocess.run([*polite, *command], capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"{Path(command[0]).name} failed: {' '.join(words[-3:])[:200]}")
