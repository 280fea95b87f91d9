"""Response times of the language server just after a keystroke, on a policy of 500 lines and the sites of Llama 3 405B.

    python -m benchmarks.language_server [--lines 500] [--rounds 40] [--out FILE]

A minimal client speaks the protocol. For each kind of request, a round changes one letter of the policy and sends the
request at once. In half of the rounds the server is idle before the keystroke; in the others it is still checking the
text of an earlier one. Prints the median, the 95th percentile and the worst of the times until the answer, and until
the diagnostics of the new text. With `--out` also writes them as JSON. Half of the rounds wait for diagnostics, which
take half a second or more, so the benchmark takes several minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser, print_header, print_row

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 126
REQUESTS = (
    "completion", "definition", "documentSymbol", "foldingRange", "formatting", "hover", "inlayHint", "codeAction",
)  # fmt: skip
SCREEN = 50  # lines that an editor shows and requests inlay hints for
READING = 2  # seconds between opening a policy and the first hover: a person looks at the text first
STARTS = 5
LIMIT = 60  # seconds without a message after which something is wrong
IN_LINT = 0.2  # seconds after a keystroke: past the server's delay, and before the end of its check


def write_policy(lines: int) -> list[str]:
    """A policy with every kind of statement. Most are rules about products of single layers, as written by a search."""
    head = [
        "# A policy as long as a search over single layers writes.",
        "# sites: sites.json",
        "recipe nv = nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
        "recipe fine = split(fprop=nv, dgrad=fp8, wgrad=bf16)",
        "group projections = q_proj, k_proj, v_proj, o_proj",
        "",
        "*                   -> bf16",
        "* where mlp         -> nv",
        "projections @ wgrad -> fp8",
        "",
    ]
    tail = [
        "",
        "after 82% {",
        "    mlp @ fprop -> bf16  # the late switch",
        "}",
        "variant no_rht { recipe nv = nvfp4(sr=grad, scale2d=weights) }",
        "variant tail {",
        "    * where layer >= -15% -> bf16",
        "}",
    ]
    places = (
        "mlp.up_proj", "mlp.{gate,down}_proj", "attention.o_proj @ wgrad", "mlp.down_proj where k % 16 == 0",
        "attention.{q,k}_proj @ dgrad, fprop",
    )  # fmt: skip
    recipes = ("bf16", "fp8", "fine", "nvfp4(sr=grad, scale2d=weights)")
    rules = []
    for number in range(lines - len(head) - len(tail)):
        layer, place = number // 4 % LAYERS, places[number % len(places)]
        rules.append(f"layers[{layer}].{place} -> {recipes[number % 3 if number % 7 else 3]}")
    return [*head, *rules, *tail]


def make_environment(folder: Path) -> dict[str, str]:
    """An environment that caches bytecode, because the modules of an installed package are compiled."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


def time_python(folder: Path, code: str) -> float:
    """Seconds that a Python process takes for some code, as a measure of the speed of the machine."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=make_environment(folder))
    return time.perf_counter() - start


class Client:
    """Speaks the protocol with a server, one message at a time."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-m", "policyc", "lsp"]
        env = {**make_environment(folder), "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._uri = (folder / "long.policy").as_uri()
        self._version = self._sent = 0
        self.checked = -1
        """The version of the newest diagnostics."""

    def _send(self, message: dict[str, Any]) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self._process.stdin.flush()

    def _give_up(self, *_: object) -> None:
        self._process.send_signal(signal.SIGABRT)  # makes it print the stacks of its threads
        raise SystemExit(f"no message from the server for {LIMIT} seconds")

    def _read(self) -> dict[str, Any]:
        stream, length = self._process.stdout, 0
        assert stream is not None
        signal.signal(signal.SIGALRM, self._give_up)
        signal.alarm(LIMIT)
        while (line := stream.readline()).strip():
            length = int(line.partition(b":")[2])
        message: dict[str, Any] = json.loads(stream.read(length))
        signal.alarm(0)
        if message.get("method") == "textDocument/publishDiagnostics":
            self.checked = message["params"].get("version", self.checked)
        return message

    def request(self, method: str, params: dict[str, Any]) -> Any:
        self._sent += 1
        self._send({"id": self._sent, "method": method, "params": params})
        while (message := self._read()).get("id") != self._sent:
            pass
        if "error" in message:
            raise SystemExit(f"{method}: {message['error']}")
        return message["result"]

    def ask(self, method: str, line: int) -> Any:
        """Sends a request about a line of the policy."""
        place = {"line": line, "character": 3}
        end = {"line": line + SCREEN, "character": 3} if method == "inlayHint" else place
        params: dict[str, Any] = {"textDocument": {"uri": self._uri}, "position": place}
        params |= {"range": {"start": place, "end": end}, "context": {"diagnostics": []}}
        params["options"] = {"tabSize": 4, "insertSpaces": True}
        return self.request(f"textDocument/{method}", params)

    def open(self, text: str) -> None:
        item = {"uri": self._uri, "languageId": "policy", "version": 0, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": item}})

    def change(self, text: str) -> None:
        self._version += 1
        document = {"uri": self._uri, "version": self._version}
        params = {"textDocument": document, "contentChanges": [{"text": text}]}
        self._send({"method": "textDocument/didChange", "params": params})

    def wait_until_checked(self) -> None:
        """Waits for the diagnostics of the last text."""
        while self.checked < self._version:
            self._read()

    def stop(self) -> None:
        self.request("shutdown", {})
        self._send({"method": "exit"})
        self._process.wait()


def start_client(folder: Path, lines: list[str], times: dict[str, list[float]]) -> Client:
    """Starts a server, and opens the policy."""
    start = time.perf_counter()
    client = Client(folder)
    client.request("initialize", {"capabilities": {}})
    times.setdefault("start", []).append(time.perf_counter() - start)
    client.open("\n".join(lines))
    return client


def measure(client: Client, lines: list[str], rounds: int) -> Iterator[tuple[str, float]]:
    """Yields the name and the seconds of each answer."""
    choose = random.Random(0)
    rules = [number for number, line in enumerate(lines) if line.startswith("layers")]
    for number in range(rounds):
        is_busy = number % 2 == 1
        for method in REQUESTS:
            if is_busy:
                client.change("\n".join(lines))
                time.sleep(IN_LINT)
            else:
                client.wait_until_checked()
            line = choose.choice(rules)
            lines[line] = type_letter(lines[line])
            start = time.perf_counter()
            client.change("\n".join(lines))
            client.ask(method, line)
            yield method + (" (busy)" if is_busy else ""), time.perf_counter() - start
            if not is_busy:
                client.wait_until_checked()
                yield "diagnostics", time.perf_counter() - start


def type_letter(line: str) -> str:
    """Types a letter after the name of a projection, or deletes it again."""
    name, rest = line.split("_proj", 1)
    return f"{name}_proj{rest.removeprefix('x')}" if rest.startswith("x") else f"{name}_projx{rest}"


def summarize(times: list[float]) -> dict[str, float]:
    """The median, the 95th percentile and the worst of the times, in milliseconds."""
    ordered = sorted(1e3 * seconds for seconds in times)
    places = {"median": len(ordered) // 2, "p95": int(0.95 * (len(ordered) - 1)), "worst": len(ordered) - 1}
    return {name: round(ordered[place], 1) for name, place in places.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lines", type=int, default=500, help="lines of the policy (default: 500)")
    parser.add_argument("--rounds", type=int, default=40, help="requests of each kind (default: 40)")
    parser.add_argument("--out", metavar="FILE", help="write the times as JSON")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = ("sites", "--config", "llama3_405b", "--format", "json", "--out", "sites.json")
        subprocess.run(
            [sys.executable, "-m", "policyc", *words],
            cwd=folder,
            env=make_environment(Path(folder)),
            check=True,
        )
        lines = write_policy(arguments.lines)
        start_client(Path(folder), lines, {}).stop()  # compiles the modules
        for _ in range(STARTS):
            times.setdefault("python -c 'pass'", []).append(time_python(Path(folder), "pass"))
            client = start_client(Path(folder), lines, times)
            time.sleep(READING)
            start = time.perf_counter()
            client.ask("hover", 7)
            times.setdefault("first hover", []).append(time.perf_counter() - start)
            client.stop()
            client = start_client(Path(folder), lines, times)
            start = time.perf_counter()
            client.ask("hover", 7)
            times.setdefault("hover as it opens", []).append(time.perf_counter() - start)
            client.wait_until_checked()
            times.setdefault("first diagnostics", []).append(time.perf_counter() - start)
            client.stop()
        client = start_client(Path(folder), lines, times)
        client.wait_until_checked()
        for name, seconds in measure(client, lines, arguments.rounds):
            times.setdefault(name, []).append(seconds)
        client.stop()
    result = {name: summarize(seconds) for name, seconds in times.items()}
    print_header(("milliseconds", "median", "p95", "worst"))
    for name, row in result.items():
        print_row((name, *(f"{value:.0f}" for value in row.values())))
    load = os.getloadavg()[0]
    print(f"\nload of the machine: {load:.2f} on {os.cpu_count()} processors")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"load": load, "milliseconds": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
