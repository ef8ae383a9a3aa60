"""What experiments share: arms and seeds, grids, sweeps, small worlds, known pairs of policies."""
