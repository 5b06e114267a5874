"""One workload twice: as real processes under a live service (`live_run`), and in the simulator; how far apart are they?

`comparison.compare` runs both. `trainer.py` is what the live jobs run, as a script.
"""
