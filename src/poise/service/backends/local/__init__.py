"""The local back end: real processes on one machine.

Start reading at `backend.py` (orders, and the life of a run), then `runner/supervisor.py` (the process that keeps one run).
Nothing is imported here: a runner imports modules of this package, and has to start fast.
"""
