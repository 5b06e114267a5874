"""The remote back end: runs on other machines, each with an agent. Start reading at `backend.py`."""
