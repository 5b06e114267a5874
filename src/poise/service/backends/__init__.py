"""Live back ends: `api.py` says what one is; `local` runs processes on this machine, `null` runs nothing (load tests).

They do not import each other.
"""
