"""Numerical methods that know nothing of jobs: rows want throughput, columns provide it, resources are limited."""
