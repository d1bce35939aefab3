"""What a run was measured on: the device, and its clock and power while it ran."""

from __future__ import annotations

import platform
import shutil
import subprocess
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "l2": properties.L2_cache_size,
            "driver": (_ask(device, "driver_version") or ["unknown"])[0],
        }
    return {
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def describe_briefly(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, threads: {torch.get_num_threads()}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _query(device: torch.device, fields: str) -> list[str] | None:
    """The command that asks about this device; by its UUID, since indices depend on CUDA_VISIBLE_DEVICES."""
    program = shutil.which("nvidia-smi")
    if not program:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = f"GPU-{uuid.removeprefix('GPU-')}" if uuid else str(device.index or 0)
    return [program, "-i", which, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def _ask(device: torch.device, fields: str) -> list[str] | None:
    command = _query(device, fields)
    if not command:
        return None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [part.strip() for part in answer.strip().split(",")]


class Monitor:
    """Reads the SM clock (MHz) and the power (W) twice a second while it is open. Without nvidia-smi, nothing."""

    def __init__(self, device: torch.device):
        self._readings: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        command = _query(device, "clocks.sm,power.draw") if device.type == "cuda" else None
        if command:
            try:
                self._process = subprocess.Popen(
                    [*command, "-lms", "500"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                threading.Thread(target=self._read, daemon=True).start()
            except OSError:
                self._process = None

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                clock, power = (float(part) for part in line.split(","))
            except ValueError:  # "[N/A]", or a message
                continue
            self._readings.append((time.monotonic(), clock, power))

    def since(self, begin: float) -> dict[str, float]:
        """Medians of the readings after that time.monotonic()."""
        readings = [reading for reading in self._readings if reading[0] >= begin]
        if not readings:
            return {}
        return {"sm_mhz": median(r[1] for r in readings), "watts": median(r[2] for r in readings)}

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
