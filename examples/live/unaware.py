"""A program that knows nothing of Poise: it prints a number a second and ends.

python examples/live/unaware.py [COUNT] [SECONDS]

Poise runs it as it is. Submitted with `--preemption never` it keeps its GPUs until it ends; with `--preemption restart` it
begins again with the first number whenever its GPUs are needed elsewhere.
"""

import sys
import time

count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
for number in range(1, count + 1):
    time.sleep(seconds)
    print(f"{number} of {count}", flush=True)
