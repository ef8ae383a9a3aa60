"""Sampling (`sampling`), what is kept of each distribution (`stores`), weights that change during a
response (`relay`), random streams by row (`streams`), an engine's filters in training (`support`).
"""
