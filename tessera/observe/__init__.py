"""Watch a run: watchdog over ranks, anomaly detection, profiler and report."""
