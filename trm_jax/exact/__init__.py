"""The truth on policies small enough to enumerate: `oracle`, on the trees of `enumeration`."""
