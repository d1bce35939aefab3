"""Prints the folder that holds NVRTC as pip installs it, or nothing."""

import sys
from pathlib import Path

for entry in sys.path:
    for folder in sorted(Path(entry or ".").glob("nvidia/*/lib")):
        if list(folder.glob("libnvrtc.so.*")):
            print(folder)
            sys.exit(0)
