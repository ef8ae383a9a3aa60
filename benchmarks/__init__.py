"""Measurements of the package: what they print is what the documentation may claim."""
