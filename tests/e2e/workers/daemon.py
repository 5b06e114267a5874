"""Leaves a process behind that nothing connects with the job: `python daemon.py LOCK`, which it holds while it lives."""

import fcntl
import os
import sys
import time

lock = sys.argv[1]
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.set_inheritable(handle, True)
    os.write(tell, b"x")
    os.closerange(0, handle)
    os.closerange(handle + 1, 1 << 16)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"], {})
os.read(ready, 1)
os.write(1, b"left it behind\n")
time.sleep(1000)
