"""Load a server with good and bad clients for a long time: no answer is lost, mixed up or cut off, and memory is flat.

    python bench/serve_soak.py runs/quickstart --pictures build/quickstart/pictures --minutes 20

The server is a process of its own: `tessera serve` with two adapters of random weights, which clients load and unload
while others ask for them. Each question is first asked alone. Under load its answer, with a seed, must be the same,
streamed or not. Meanwhile clients are killed, send broken images and requests, dribble headers and bodies or do not
read, and decoder processes and their server are killed. At last the server itself is killed: no process may remain.

One JSON line: counts of requests, answers and errors by kind, and memory, blocks and file handles by time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_soak_requests import ADAPTERS, CHAT, Question, bad_requests, chat_body, outcome, questions, streamed_outcome

_JSON = {"Content-Type": "application/json"}
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@dataclass
class Server:
    """Hold the process of a server."""

    process: subprocess.Popen[str]
    port: int

    @staticmethod
    def start(model: Path, adapters: Path, log: Path, options: list[str]) -> Server:
        command = [sys.executable, "-m", "tessera", "serve", str(model), "--port", "0", "--name", "base", *options]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--allow-adapters", str(adapters)], stdout=output, stderr=subprocess.STDOUT, text=True
            )
        while process.poll() is None:
            if match := re.search(r"serving at http://127\.0\.0\.1:(\d+)/v1", log.read_text()):
                return Server(process, int(match[1]))
            time.sleep(0.2)
        raise SystemExit(f"the server did not start: {log.read_text()}")

    def descendants(self) -> dict[int, int]:
        """Return the depth of each process below the server: 1 the first server, 2 a pool's server, 3 a decoder."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        depths = {self.process.pid: 0}
        for _ in range(4):
            depths |= {pid: depths[parent] + 1 for pid, parent in parents.items() if parent in depths}
        return {pid: depth for pid, depth in depths.items() if depth}

    def request(self, path: str, body: dict[str, Any] | bytes | None = None, timeout: float = 600) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            connection.request("GET" if data is None else "POST", path, data, _JSON)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def figures(self) -> dict[str, float]:
        """Return memory in MiB, file handles, threads, and what the engine holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        children = sum(_pss(pid) for pid in self.descendants())
        metrics = self.request("/metrics")[1].decode()
        engine = dict(
            re.findall(r"^tessera_engine_(blocks_used|running|waiting|preemptions_total) (\S+)", metrics, re.M)
        )
        return {
            "memory_mib": round(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024, 1),
            "decoders_mib": round(children, 1),
            "handles": len(os.listdir(f"/proc/{self.process.pid}/fd")),
            "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
            **{name.removesuffix("_total"): float(value) for name, value in engine.items()},
        }


def _pss(pid: int) -> float:
    """Return the memory of a process in MiB; shared pages count in parts."""
    with contextlib.suppress(OSError, IndexError):
        return int(re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[0]) / 1024
    return 0.0


# ------------------------------------------------------------------------------------------------- clients


class Soak:
    """Run clients against a server until a time, and count what happens."""

    def __init__(self, server: Server, items: list[Question], bad: list[tuple[str, str, bytes, set[int]]]) -> None:
        self.server, self.items, self.bad = server, items, bad
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.seconds: dict[str, list[float]] = {}  # of right answers, by kind
        self.samples: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._until = 0.0

    def count(self, name: str, fault: str | None = None) -> None:
        with self._lock:
            self.counts[name] += 1
            if fault is not None:
                self.counts["faults"] += 1
                self.faults.append(f"{name}: {fault}"[:1500])
                print(self.faults[-1], file=sys.stderr, flush=True)

    def run(self, minutes: float, clients: int, slow: int) -> None:
        """Run all clients, with a sample of the figures every 15 seconds."""
        self._until = time.monotonic() + 60 * minutes
        work = [self._ask] * clients + [self._refused] * 2 + [self._vanish] * 2
        work += [self._change_adapters, self._kill_decoders]
        work += [self._dribble_body, self._dribble_head] * slow + [self._read_nothing] * -(-slow // 4)
        threads = [threading.Thread(target=self._loop, args=(each, seed)) for seed, each in enumerate(work)]
        for thread in threads:
            thread.start()
        while time.monotonic() < self._until:
            self.samples.append(self.server.figures())
            time.sleep(min(15.0, max(0.0, self._until - time.monotonic())))
        for thread in threads:
            thread.join()

    def _loop(self, work: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._until:
            try:
                work(chance)
            except Exception as error:
                self.count("client failed", f"{work.__name__}: {error!r}")

    def _ask(self, chance: random.Random) -> None:
        item = chance.choice(self.items)
        stream = item.path == CHAT and chance.random() < 0.5
        body = {**item.body, "stream": True, "stream_options": {"include_usage": True}} if stream else item.body
        self.count("requests")
        began = time.monotonic()
        try:
            status, data = self.server.request(item.path, body)
        except Exception as error:
            self.count("lost answers", f"{item.kind}: {error!r}")
            return
        if status != 200:
            if status == 404 and item.kind in ADAPTERS:
                self.count("adapter not loaded (expected)")
            elif status == 400 and item.kind in ADAPTERS and b"adapter" in data:
                self.count("adapter unloaded while the request waited (expected)")
            else:
                self.count("refused valid requests", f"{item.kind} {status} {data[:300]!r}")
            return
        try:
            answer = streamed_outcome(data) if stream else outcome(item.path, data)
        except Exception as error:
            self.count("truncated answers", f"{item.kind} {error!r} {data[-300:]!r}")
            return
        self.count("answers")
        with self._lock:
            self.seconds.setdefault(item.kind, []).append(time.monotonic() - began)
        if answer not in item.expected:
            others = [other.kind for other in self.items if answer in other.expected]
            name = "mixed-up answers" if others else "different answers"
            self.count(name, f"{item.kind} stream={stream}: {answer} instead of {item.expected}; that of {others}")

    def _refused(self, chance: random.Random) -> None:
        name, path, body, statuses = chance.choice(self.bad)
        self.count("bad requests")
        began = time.monotonic()
        status, data = self.server.request(path, body)
        seconds = time.monotonic() - began
        if status not in statuses:
            self.count("bad requests answered wrongly", f"{name}: {status} {data[:300]!r}")
        self.count(f"refused: {name}")
        with self._lock:
            self.counts[f"longest ms: {name}"] = max(self.counts[f"longest ms: {name}"], int(1000 * seconds))
        time.sleep(chance.random())

    def _begun(self, body: dict[str, Any], promised: int | None = None, buffer: int | None = None) -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock = socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(120)
        sock.connect(("127.0.0.1", self.server.port))
        sock.sendall(f"{head}Content-Length: {promised or len(data)}\r\n\r\n".encode())
        if promised is None:
            sock.sendall(data)
        return sock

    def _vanish(self, chance: random.Random) -> None:
        """Send a request, read a part of its answer, and reset the connection."""
        item = chance.choice([item for item in self.items if item.path == CHAT])
        with self._begun({**item.body, "stream": chance.random() < 0.7, "max_tokens": 200}) as sock:
            time.sleep(chance.random() ** 3)
            if chance.random() < 0.7:
                sock.settimeout(chance.random())
                with contextlib.suppress(OSError):
                    sock.recv(chance.randrange(1, 2000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.count("vanished clients")

    def _dribble_body(self, chance: random.Random) -> None:
        with self._begun({}, promised=100_000) as sock, contextlib.suppress(OSError):
            while time.monotonic() < self._until:
                sock.sendall(b" ")
                time.sleep(0.5)
        self.count("dribbled bodies")

    def _dribble_head(self, chance: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as sock, contextlib.suppress(OSError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            while time.monotonic() < self._until:
                sock.sendall(b"a")
                time.sleep(0.5)
        self.count("dribbled headers")

    def _read_nothing(self, chance: random.Random) -> None:
        """Ask for a large stream, and read none of it: the answer is aborted, and its blocks come back."""
        body = chat_body("hi", [], max_tokens=2000, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True)
        with self._begun(body, buffer=4096):
            time.sleep(min(60.0, max(0.0, self._until - time.monotonic())))
        self.count("clients that read nothing")

    def _change_adapters(self, chance: random.Random) -> None:
        """Unload an adapter and load it again, now and then with other weights under the same name."""
        time.sleep(4 * chance.random())
        name = chance.choice(ADAPTERS)
        for path, body in (
            ("/v1/unload_lora_adapter", {"lora_name": name}),
            ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": chance.choice([name, "third"])}),
        ):
            status, data = self.server.request(path, body)
            while path.startswith("/v1/load") and status != 200 and b"adapter.name-in-use" in data:
                time.sleep(0.2)  # requests that use the old adapter are still answered
                status, data = self.server.request(path, body)
            if status != 200:
                self.count("adapters not changed", f"{path} {status} {data[:300]!r}")
        self.count("adapters changed")

    def _kill_decoders(self, chance: random.Random) -> None:
        time.sleep(10 + 10 * chance.random())
        depth = 2 if chance.random() < 0.1 else 3
        chosen = [pid for pid, level in self.server.descendants().items() if level == depth]
        if chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(chosen), signal.SIGKILL)
            self.count("killed decoders" if depth == 3 else "killed servers of decoders")


@contextlib.contextmanager
def adapter_folders(model: Path) -> Iterator[Path]:
    """Write three adapters of random weights for a model."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import tessera
    from tests.toys.banked import Banked, linear_layers

    loaded, _ = tessera.load(model, device="cpu")
    written = Banked(loaded.spec, loaded.config, loaded.module)
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate((*ADAPTERS, "third")):
            written.write(Path(folder) / name, linear_layers(loaded.module, "text."), seed)
        yield Path(folder)


def ask_alone(server: Server, items: list[Question]) -> None:
    """Ask each question alone, those of adapters with all weights that their names may have."""
    for name in ADAPTERS:
        for path in ("third", name):
            assert server.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})[0] == 200
            for item in (item for item in items if item.kind == name):
                item.expected.append(outcome(item.path, server.request(item.path, item.body)[1]))
            if path == "third":
                assert server.request("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    for item in (item for item in items if item.kind not in ADAPTERS):
        status, data = server.request(item.path, item.body)
        assert status == 200, data
        item.expected.append(outcome(item.path, data))


def remaining_after_kill(server: Server, seconds: float = 10.0) -> int:
    """Kill the server, and return how many of its processes remain."""
    processes = [*server.descendants()]
    server.process.kill()
    server.process.wait()
    until = time.monotonic() + seconds
    while (remaining := sum(Path(f"/proc/{pid}").exists() for pid in processes)) and time.monotonic() < until:
        time.sleep(0.1)
    return remaining


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pictures", type=Path, required=True, help="folder of .png images")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--slow", type=int, default=4, help="clients that dribble bodies, and as many headers")
    parser.add_argument("--log", type=Path, default=Path("serve_soak.log"), help="output of the server")
    options = parser.parse_args()
    pictures = [path.read_bytes() for path in sorted(options.pictures.glob("*.png"))[:40]]
    items = questions(pictures)
    with adapter_folders(options.model) as adapters:
        server = Server.start(options.model, adapters, options.log, ["--rows", "32", "--max-requests", "256"])
        try:
            ask_alone(server, items)
            start = server.figures()
            soak = Soak(server, items, bad_requests(pictures[0]))
            soak.run(options.minutes, options.clients, options.slow)
            time.sleep(35)  # clients that read nothing are given up after 30 s
            end = server.figures()
        finally:
            orphans = remaining_after_kill(server)
    line = {"case": "serve_soak", "minutes": options.minutes, **dict(sorted(soak.counts.items()))}
    line["median_and_longest_s"] = {
        kind: [round(sorted(times)[len(times) // 2], 2), round(max(times), 2)] for kind, times in soak.seconds.items()
    }
    print(json.dumps({**line, "start": start, "end": end, "orphans": orphans, "samples": soak.samples}))
    if soak.faults or orphans or end["running"] or end["waiting"]:
        raise SystemExit(f"{len(soak.faults)} faults")


if __name__ == "__main__":
    main()
