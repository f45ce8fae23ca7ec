"""The commands of the command line. Each calls a function of the Python API."""
