"""Prints what a process finds when it starts, and what its child does; ends with exit code 3."""

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading


def words(name):
    return [word for word in open(f"/proc/self/{name}").read().split(chr(0)) if word.strip()]


def coerced(environment):  # which an interpreter adds for itself in the C locale
    return sorted(word for word in environment if not word.startswith("LC_CTYPE"))


found = {
    "name": __name__,
    "file": globals().get("__file__"),
    "argv": sys.argv,
    "path": sys.path,
    "cwd": os.getcwd(),
    "parent": os.getppid(),
    "leads its session": os.getsid(0) == os.getpid(),
    "environment": coerced(f"{name}={value}" for name, value in os.environ.items()),
    "shown environment": coerced(words("environ")),
    "shown command": words("cmdline"),
    "files": [number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")],
    "input": sys.stdin.read(),
    "streams": [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)],
    "handlers": [str(signal.getsignal(number)) for number in range(1, 16)],
    "daemon": multiprocessing.current_process().daemon,
    "main": sys.modules["__main__"].__dict__ is globals(),
}
import torch  # noqa: E402 (what is above is found without it)

found["threads"] = torch.get_num_threads()
if sys.argv[-1] == "parent":  # and what a child of it finds, which is forked by it
    child = subprocess.run([sys.executable, *sys.argv[:-1], "child"], stdout=subprocess.PIPE)
    found["child"] = json.loads(child.stdout.splitlines()[0]) | {"code": child.returncode}
    assert found["child"].pop("parent") == os.getpid()
print(json.dumps(found))
print("at the end", file=sys.stderr)


def outlive_the_program():
    threading.main_thread().join()
    print("by a thread", file=sys.stderr)


threading.Thread(target=outlive_the_program).start()
atexit.register(print, "at exit", file=sys.stderr)
atexit.register(ctypes.CDLL(None).puts, b"by C")
sys.exit(3)
