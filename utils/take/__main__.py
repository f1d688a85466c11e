import signal

from . import main

if hasattr(signal, "SIGPIPE"):  # not on Windows; with it, `| head` ends this process without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
main()
