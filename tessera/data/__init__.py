"""From files to batches: sources, samples, index, order, rows, loader. `data.kind` names the kind of a data set."""
