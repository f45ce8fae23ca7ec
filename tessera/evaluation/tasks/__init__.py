"""Read benchmarks from task files. The task files of published benchmarks are beside this file."""
