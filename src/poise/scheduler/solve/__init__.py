"""Numerical machinery that knows nothing of jobs: rows want throughput, columns give it, resources run out."""
