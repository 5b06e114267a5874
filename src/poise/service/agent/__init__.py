"""The agent of a node: carries out the server's orders there. Start reading at `agent.py`."""
