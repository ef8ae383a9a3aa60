"""Experiments: one file is one question, run as `python -m experiments.<name>`."""
