"""Time the files of this kit on this device: python measure.py [--threads N] [--out FILE].

Needs Python 3.9 or newer, numpy and onnxruntime, nothing else. Writes times.json next to kit.json after every
group of files; started again after an interruption it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
FINE_CLOCK = 1e-6  # seconds; the processor time of some systems moves in steps of 16 ms


def main() -> None:
    """Time all groups that are not timed yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kit = json.loads((HERE / "kit.json").read_text(encoding="utf-8"))
    parser.add_argument("--threads", type=int, default=kit["threads"], help="threads that compute a file")
    parser.add_argument("--out", type=Path, default=HERE / "times.json", help="the table to write")
    arguments = parser.parse_args()
    claim = claimed(arguments.out)
    table = begun(kit, arguments.threads, arguments.out)
    todo = [group for group in kit["groups"] if not all(known(table, name) for name in group["files"])]
    if len(todo) < len(kit["groups"]):
        print(f"{arguments.out} holds {len(kit['groups']) - len(todo)} groups already", flush=True)
    files, done, start = sum(len(group["files"]) for group in todo), 0, time.perf_counter()
    for group in todo:
        times, failed = timed(group, arguments.threads, compare=kit["compare"])
        table["times"].update(times)
        table["failed"].update(failed)
        table["left"] = sum(not known(table, name) for each in kit["groups"] for name in each["files"])
        write(table, arguments.out)
        done += len(group["files"])
        left = (time.perf_counter() - start) / done * (files - done)
        print(f"{done} of {files} files, about {left / 60:.1f} minutes left", flush=True)
        for name, reason in failed.items():
            print(f"  {name} does not run here: {reason}", flush=True)
    print(f"{arguments.out}: all files are timed, {len(table['failed'])} of them do not run here")
    if kit["compare"]:
        show(kit, table)
    claim.close()


def claimed(path: Path) -> socket.socket:
    """Return a port of this machine that only one measurement into a table holds, until it ends or dies."""
    name = str(path.resolve())
    port = 20000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10000
    claim = socket.socket()
    try:
        claim.bind(("127.0.0.1", port))
        claim.listen()
    except OSError:
        sys.exit(
            f"{path} is written by another measurement (port {port} of this machine is taken); wait for "
            "that, or name another file with --out."
        )
    return claim


def begun(kit: dict[str, Any], threads: int, path: Path) -> dict[str, Any]:
    """Return the table to go on with, a new one if there is none."""
    total = sum(len(group["files"]) for group in kit["groups"])
    machine = {
        "processor": processor(),
        "system": platform.platform(),
        "runtime": "onnxruntime",
        "version": onnxruntime.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "clock": "wall" if clock(threads) is time.perf_counter_ns else "processor",
    }
    head = {"version": kit["version"], "kit": kit["digest"], "about": kit["about"], "machine": machine}
    if not path.exists():
        return {**head, "networks": kit["networks"], "left": total, "times": {}, "failed": {}}
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in head.items():
        if table.get(name) != value:
            sys.exit(f"{path} was begun with another {name} ({table.get(name)}, now {value}); move it away.")
    return table


def known(table: dict[str, Any], name: str) -> bool:
    """Tell whether a file is timed, or known not to run."""
    return name in table["times"] or name in table["failed"]


def show(kit: dict[str, Any], table: dict[str, Any]) -> None:
    """Print the times of whole networks, compared with the first one."""
    first = table["times"].get(kit["networks"][0]["file"])
    print("score, milliseconds, share of the first one's, largest difference of outputs:")
    for network in kit["networks"]:
        known = table["times"].get(network["file"])
        score = "-" if network["score"] is None else f"{network['score']:.4f}"
        if known is None:
            print(f"  {network['title']}: {score}, does not run here")
            continue
        share = "-" if first is None else f"{known['median_ms'] / first['median_ms']:.3f}"
        difference = "-" if known.get("difference") is None else f"{known['difference']:.2g}"
        print(f"  {network['title']}: {score}, {known['median_ms']:.3f} ms, {share}, {difference}")


def timed(
    group: dict[str, Any], threads: int, *, compare: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Time the files of a group in turns (A B C, C B A, ...); return times, and errors of those that fail."""
    inputs = {each["name"]: read_array(each) for each in group["inputs"]}
    sessions, outputs, failed, read = {}, {}, {}, clock(threads)
    for name in group["files"]:
        try:
            session = opened(gzip.decompress((HERE / "models" / f"{name}.onnx.gz").read_bytes()), threads)
            for _ in range(max(1, group["warm_up"])):
                session.run(None, inputs)
            if compare:
                outputs[name] = session.run(None, inputs)[0]
            sessions[name] = session
        except Exception as error:  # whatever the runtime raises: one file must not stop the kit
            failed[name] = " ".join(str(error).split())[:300]
    times: dict[str, list[int]] = {name: [] for name in sessions}
    for turn in range(group["runs"]):
        for name in list(sessions)[:: 1 if turn % 2 == 0 else -1]:
            session = sessions[name]
            session.run(None, inputs)  # other files have pushed its tensors out of the cache
            start = read()
            session.run(None, inputs)
            times[name].append(read() - start)
    summaries = {name: summary(each) for name, each in times.items()}
    original = outputs.get(group["files"][0])
    for name, each in outputs.items():
        if original is not None:
            summaries[name]["difference"] = float(np.abs(each.astype(float) - original.astype(float)).max())
    return summaries, failed


def opened(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    """Open a file as rankrl does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def read_array(entry: dict[str, Any]) -> np.ndarray:
    data = gzip.decompress((HERE / entry["file"]).read_bytes())
    return np.frombuffer(data, entry["dtype"]).reshape(entry["shape"])


def summary(nanoseconds: list[int]) -> dict[str, float]:
    """Return median and minimum in milliseconds, above 0 whatever the clock's steps."""
    median, least = float(np.median(nanoseconds)), min(nanoseconds)
    return {"median_ms": max(median, 1.0) / 1e6, "minimum_ms": max(least, 1) / 1e6}


def clock(threads: int) -> Any:
    """Return the clock: processor time for one thread, which excludes other work, else wall time."""
    fine = time.get_clock_info("thread_time").resolution <= FINE_CLOCK
    return time.thread_time_ns if threads == 1 and fine else time.perf_counter_ns


def processor() -> str:
    for path, key in (("/proc/device-tree/model", ""), ("/proc/cpuinfo", "model name")):
        try:
            for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith(key):
                    return line.split(":")[-1].strip(" \0")
        except OSError:
            continue
    return platform.processor() or platform.machine()


def write(table: dict[str, Any], path: Path) -> None:
    """Write the table whole or not at all: a device may lose power."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
