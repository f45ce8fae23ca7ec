"""Make recordings of runs and models, and compare two of them: the commands `record` and `compare A B`."""
