"""The loader: each rank's share of the rows, made into batches on the device ahead of use."""
