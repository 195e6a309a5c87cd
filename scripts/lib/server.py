"""A vLLM server as a context manager: started on a fresh port, gone afterwards.

The server runs in a session of its own. On every way out (success, error,
signal) it and all its descendants are stopped; if this process is killed
outright, the kernel sends the server SIGTERM.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from scripts.lib import cli, engine, processes
from scripts.lib.errors import UserError

MODEL_NAME = "verifier"
_STOP_SECONDS = 20
_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total"
    r"(\{[^}]*\})? ([0-9.e+-]+)$"
)
_POSITION = re.compile(r'position="(\d+)"')


def parse_counters(text: str) -> Counter:
    """Read the speculative decoding counters from Prometheus text, summed over engines.

    Returns:
        Counter with `drafts`, `drafted`, `accepted` and `accepted_<i>` for 0-based
        position i. `_created` time stamps, whose names match loosely, are left out.
    """
    names = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
    result: Counter = Counter()
    for line in text.splitlines():
        if not (match := _COUNTER.match(line)):
            continue
        kind, labels, value = match.groups()
        if kind == "accepted_tokens_per_pos":
            name = "accepted_" + _POSITION.findall(labels)[0]
        else:
            name = names[kind]
        result[name] += int(float(value))
    return result


def speculative_config(algorithm: str, checkpoint: Path, k: int) -> dict:
    """Return vLLM's speculative config for a checkpoint, the method given explicitly.

    vLLM otherwise guesses the method from substrings of the path.

    Raises:
        UserError: for an algorithm whose method is not known.
    """
    methods: dict[str, dict] = {
        "eagle3": {"method": "eagle3", "parallel_drafting": False},
        # Without the flag vLLM loads a P-EAGLE draft and runs it as EAGLE-3.
        "peagle": {"method": "eagle3", "parallel_drafting": True},
        "dflash": {"method": "dflash"},
        "dflash2": {"method": "dflash"},
        "dspark": {"method": "dspark"},
    }
    if algorithm not in methods:
        raise UserError(f"no serving method is known for the algorithm {algorithm!r}.")
    return methods[algorithm] | {"model": str(checkpoint), "num_speculative_tokens": k}


class Server:
    """One vLLM OpenAI server.

    Args:
        model_dir: verifier directory.
        template: chat template text.
        runtime: engine settings.
        log_file: receives the server's output.
        max_model_len: context length.
        speculative: vLLM's speculative config, or None.
        seed: engine seed.
    """

    def __init__(
        self, model_dir, template, runtime, log_file, max_model_len, speculative=None, seed=0
    ):
        self.runtime, self.log_file, self.speculative = runtime, Path(log_file), speculative
        self.port, self.key = processes.free_port(), secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}"
        template_file = self.log_file.with_suffix(".jinja")
        template_file.parent.mkdir(parents=True, exist_ok=True)
        template_file.write_text(template)
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model_dir), "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--chat-template", str(template_file), "--max-model-len", str(max_model_len),
            "--max-num-seqs", str(runtime["max_num_seqs"]), "--seed", str(seed),
            "--tensor-parallel-size", str(runtime.get("tensor_parallel_size", 1)),
            "--no-enable-prefix-caching", "--generation-config", "vllm",
        ]  # fmt: skip
        if runtime["enforce_eager"]:
            self.command.append("--enforce-eager")
        if speculative:
            self.command += [
                "--speculative-config", json.dumps(speculative),
                "--per-request-spec-decode-metrics", "detailed",
            ]  # fmt: skip
        self.process: subprocess.Popen | None = None

    # -- life ------------------------------------------------------------------

    def __enter__(self):
        engine.set_environment(self.runtime)
        environment = os.environ | {
            # /server_info, by which the speculative method is read back, is a dev route.
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": self.key,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }  # fmt: skip
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if self.runtime["device"] == "cpu" and openmp.exists():
            # vLLM asks for Intel's OpenMP where it speculates on a CPU; the bare
            # verifier gets it as well, so that both are compared on equal terms.
            environment["LD_PRELOAD"] = str(openmp)
        started = time.monotonic()
        self.process = processes.start(self.command, self.log_file, environment)
        try:
            self._wait_until_ready(started)
            self._check_identity()
        except BaseException:
            self.stop()
            raise
        cli.log.info("server ready after %.0f s", time.monotonic() - started)
        return self

    def __exit__(self, *_):
        self.stop()

    def _last_error(self) -> str:
        """Return the line of the server's log that says most about why it ended."""
        lines = [line.strip() for line in self.log_file.read_text(errors="replace").splitlines()]
        telling = [s for s in lines if re.search(r"\b\w*(Error|Exception)\b: ", s)]
        # The first error is the cause; later ones report that the engine ended.
        return (telling or lines or ["no output"])[0 if telling else -1][-400:]

    def check_alive(self) -> None:
        """Raise a UserError when the server process has ended."""
        code = self.process.poll() if self.process else None
        if code is not None:
            raise UserError(
                f"the vLLM server ended with status {code}: {self._last_error()} (whole log: "
                f"{self.log_file}). Finished parts are kept; mend the cause and run again."
            )

    def _wait_until_ready(self, started: float) -> None:
        limit = self.runtime["server_start_seconds"]
        while True:
            self.check_alive()
            try:
                self.get("/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                pass
            if time.monotonic() - started > limit:
                raise UserError(
                    f"the vLLM server was not ready after {limit} s: {self._last_error()} (log: "
                    f"{self.log_file}). Raise runtime.server_start_seconds if it is only slow."
                )
            time.sleep(0.5)

    def _check_identity(self) -> None:
        models = [m["id"] for m in json.loads(self.get("/v1/models"))["data"]]
        if models != [MODEL_NAME]:
            raise UserError(f"{self.url} serves {models}, not the model just started.")
        found = self.found = self.read_back()
        wanted = self.speculative or {}
        for name in ("method", "num_speculative_tokens", "parallel_drafting"):
            if name in wanted and found.get(name) != wanted[name]:
                raise UserError(
                    f"vLLM runs with {name}={found.get(name)!r}, asked for {wanted[name]!r}. "
                    "This vLLM does not serve the checkpoint as it was trained."
                )
        if not wanted and found:
            raise UserError(f"vLLM speculates ({found.get('method')}) though it was not asked to.")

    def read_back(self) -> dict:
        """Return the speculative settings that the running server reports ({} for none)."""
        info = json.loads(self.get("/server_info?config_format=json", timeout=120))
        config = info["vllm_config"].get("speculative_config") or {}
        names = ("method", "num_speculative_tokens", "parallel_drafting", "draft_sample_method")
        return {n: config[n] for n in names if n in config}

    def stop(self) -> None:
        """Stop the server and every descendant; return when all are gone."""
        if self.process is None:
            return
        processes.stop(self.process, _STOP_SECONDS)
        self.process = None

    # -- requests --------------------------------------------------------------

    def get(self, path: str, timeout: float = 30) -> str:
        """Return the body of a GET request."""
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.read().decode()

    def counters(self) -> Counter:
        """Return the speculative decoding counters as they stand now."""
        return parse_counters(self.get("/metrics"))
