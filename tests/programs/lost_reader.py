"""Prints to a stdout or stderr that can no longer be written to, and ends with exit code 7."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.console import show

show("first")
sys.stdin.readline()  # until the reader has gone
for number in range(3):
    show(f"line {number}")
    print("of the user's own")
os.write(1, b"of a library")
sys.exit(7)
