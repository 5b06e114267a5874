"""Believed speeds: tables of measured throughputs, and how they answer for the jobs and GPUs of a cluster."""
