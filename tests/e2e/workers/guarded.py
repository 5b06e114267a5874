"""Runs a script while it holds the locks of its job and of its GPUs: `python guarded.py FOLDER SCRIPT [WORD]...`.

Of several ranks each holds those of its rank and of its own GPU. Whoever finds one taken writes that down in
FOLDER/violations: two runs of a job, or two jobs on a GPU, were there at once.
"""

import fcntl
import os
import runpy
import sys
from pathlib import Path

folder, script = sys.argv[1:3]
run = os.environ["POISE_RUN"]
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
if int(os.environ["LOCAL_WORLD_SIZE"]) > 1:  # a process for each GPU
    gpus = [gpus[int(os.environ["LOCAL_RANK"])]]
node = Path(os.environ["POISE_RUN_DIR"]).parents[3].name  # each has a state directory of its own
names = [f"job-{os.environ['POISE_JOB']}-{os.environ['RANK']}", *(f"gpu-{node}-{each}" for each in gpus)]
for name in names:
    handle = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(os.path.join(folder, "violations"), "a", encoding="utf-8") as file:
            file.write(f"run {run} found {name} taken by run {os.pread(handle, 100, 0).decode()}\n")
        sys.exit(99)
    os.ftruncate(handle, 0)
    os.pwrite(handle, run.encode(), 0)
sys.argv[:] = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
