"""Ways to start the same command on many hosts; see README.md beside this file."""
